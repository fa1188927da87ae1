"""so101: "pick up the red cube" with an arm like the SO-101, commanded by joint positions.

An action is the absolute targets of the six joints in radians, the gripper as an opening from 0 (closed) to 1; the
state is their measured positions in the same order, under LeRobot's names ("shoulder_pan.pos", ...).

Success and failure are those of lift (``sims/mujoco/tasks/lift.py``), within ``seconds``: the named cube's centre at
least 6 cm above the table at the end of 5 control steps in a row.

The arm, its kinematics and its scene as MJCF text come after the task.  Frames, lengths, joint limits, masses, inertias
and servos are those of the published model, TheRobotStudio/SO-ARM100 ``Simulation/SO101/so101_new_calib.xml`` (every
joint's zero is the middle of its range).  Shapes are ours: boxes and cylinders of about the real parts' sizes, of which
the two jaws and the gripper's motor touch things.  World frame: that of the arm's base, which stands on the table; x
ahead of it, y to its left, z up; metres and radians.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mujoco
import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, declare_mujoco, make_env
from sims.mujoco.generators import Generators
from sims.mujoco.render import Scenes, labelled
from sims.mujoco.scene import PHYSICS_DT, RobotText, compile_scene
from sims.mujoco.tabletop import Instruct, Robot
from sims.mujoco.tasks.lift import LiftTask, lift_potential
from vla_rl.contract.env import Array, ArraySpec, Observation, on_host
from vla_rl.contract.errors import UserError

STRIDE = 0.04  # radians per control step, of the joint that moves most
OPEN, CLOSED = 0.6, 0.1  # commanded openings
CLEARANCE = 0.010  # metres from the fixed jaw to a cube's face, before the moving jaw closes
TRAVEL_HEIGHT, GRASP_HEIGHT, HOLD_HEIGHT = 0.085, 0.018, 0.10  # metres of the pinch point
RISE = 0.03  # metres above the pinch point that a held cube is carried towards
NEAR = 0.008  # metres beside the place to grasp within which the gripper may descend
_BETWEEN = 0.022  # metres from the pinch point within which a cube is between the jaws
_HELD = (0.18, 0.30)  # openings between which there is a cube in the gripper
_CLOSING = 0.1  # opening per control step by which the jaws close
# Of the random pictures: shares in which the gripper holds a cube, and is close to one; its opening when it holds one.
_HOLDING, _AROUND, _HOLDING_OPENING = 0.3, 0.4, 0.25


class So101Lift(LiftTask):
    """The rules of lift for one red cube, or for more of several colours."""

    name = "so101"
    fewest = (1, 1)

    def __init__(
        self,
        control_hz: int = 25,
        cubes: int = 1,
        colours: int = 1,
        instruct: Instruct = "target",
        deadline: int | None = None,
        seconds: int = 6,
    ) -> None:
        """``seconds``: the longest episode; raises UserError for none."""
        if seconds < 1:
            raise UserError(f"seconds={seconds} leaves no time to pick anything up; give at least 1.")
        super().__init__(cubes, colours, instruct, deadline, robot=So101(control_hz))
        self.time_limit = seconds * control_hz


class So101Expert:
    """A scripted expert, without state: an action follows from the observation alone.

    It moves above the named cube, descends beside it, closes, lifts and holds.
    """

    def __init__(self, horizon: int = 1) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,6], the later ones from predicted joints and cubes."""
        joints = on_host(obs.state).astype(np.float64)
        cube = on_host(obs.extras["privileged/target"]).astype(np.float64)
        actions = np.empty((len(joints), self._horizon, 6), np.float32)
        for i in range(self._horizon):
            actions[:, i] = action = _next(joints, cube)
            cube = cube + np.where(_holds(joints, cube), 1.0, 0.0)[:, None] * (
                pinch_point(action) - pinch_point(joints)
            )
            joints = _predicted(joints, action, cube)
        return actions


def _next(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Targets [E,6] of one control step from ``joints`` [E,6] and the named ``cube`` [E,3]."""
    pinch, holding = pinch_point(joints), _holds(joints, cube)
    angle = np.arctan2(cube[:, 1], cube[:, 0] - LINKS[0].position[0])
    beside = cube[:, :2] - CLEARANCE * np.stack([-np.sin(angle), np.cos(angle)], axis=1)
    away = np.linalg.norm(beside - pinch[:, :2], axis=1)
    centred = np.linalg.norm(cube[:, :2] - pinch[:, :2], axis=1) < CLEARANCE + NEAR
    grip = holding | (centred & (pinch[:, 2] < GRASP_HEIGHT + 0.006))
    # The larger the distance, the higher the gripper stays: a funnel, so that the height is a function of the position.
    height = np.clip(GRASP_HEIGHT + (away - NEAR) * 3.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([beside, height])
    goal[holding] = np.column_stack([pinch[:, :2], np.minimum(pinch[:, 2] + RISE, HOLD_HEIGHT)])[holding]
    wanted = solve(goal, ROLL)
    stay = grip & ~holding  # until the jaws have closed
    wanted[stay] = joints[stay, :5]
    left = wanted - joints[:, :5]
    moved = joints[:, :5] + left * np.minimum(1.0, STRIDE / np.maximum(np.abs(left).max(1), 1e-9))[:, None]
    return np.column_stack([moved, np.where(grip, CLOSED, OPEN)])


def _predicted(joints: np.ndarray, action: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """[E,6]: the arm reaches its targets in a control step; the jaws take several and stop at a cube."""
    opening = np.clip(action[:, 5], joints[:, 5] - _CLOSING, joints[:, 5] + _CLOSING)
    between = np.linalg.norm(cube - pinch_point(joints), axis=1) < _BETWEEN
    return np.column_stack([action[:, :5], np.where(between, np.maximum(opening, np.mean(_HELD)), opening)])


def _holds(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """bool [E]: the jaws have closed on the cube."""
    near = np.linalg.norm(cube - pinch_point(joints), axis=1) < _BETWEEN
    return np.asarray(near & (joints[:, 5] > _HELD[0]) & (joints[:, 5] < _HELD[1]))


def potential(obs: Observation) -> np.ndarray:
    """As that of lift: half for the gripper at the named cube, half for the height of that cube."""
    return lift_potential(pinch_point(np.asarray(obs.state, np.float64)), obs)


def scenes(count: int, seed: int, size: int = 64, camera: str = "front", cubes: int = 1, colours: int = 1) -> Scenes:
    """``count`` random pictures (``scenes.py``): the gripper anywhere above the cubes, close to one, or holding one."""
    task, rng = So101Lift(cubes=cubes, colours=colours), np.random.Generator(np.random.PCG64(seed))
    episodes = task.blank_episodes(count)
    for row in range(count):
        episodes[[row]] = task.sample_episodes(Generators([rng]))
    qpos, ctrl, task_state = episodes.qpos, episodes.ctrl, episodes.task_state
    share, chosen, rows = rng.random(count), rng.integers(cubes, size=count), np.arange(count)
    held, around = share < _HOLDING, (share >= _HOLDING) & (share < _HOLDING + _AROUND)
    close = task.centres(qpos)[rows, chosen] + rng.uniform([-0.02, -0.02, 0.0], [0.02, 0.02, 0.06], (count, 3))
    qpos[around, :5] = solve(close[around], ROLL)
    qpos[held, 5] = closing_angle(_HOLDING_OPENING)
    places = qpos[:, task.robot.first_cube :].reshape(count, cubes, 7)
    places[rows[held], chosen[held], :3] = pinch_point(qpos[held])
    ctrl[:, :6] = qpos[:, :6]
    named = task.centres(qpos)[rows, task_state["named"]][:, None]
    return labelled(task, qpos, ctrl, task_state, named, size, camera)


@declare_mujoco(
    So101Lift,
    expert=So101Expert,
    scenes="sims.mujoco.tasks.so101:scenes",
    progress=potential,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The SO-101 environment.

    Options of the task: ``control_hz`` 20, 25, 40 or 50 (25), ``cubes`` 1-4 (1), ``colours`` at least as many and at
    most 6 (1), ``instruct`` "target" or "distractor", ``deadline`` control steps after which an unfinished episode has
    failed (none), ``seconds`` of the longest episode (6).  Cameras are "front" and "wrist"; the rest: see ``make_env``.
    """
    return make_env(So101Lift, num_envs, options)


# -- the arm ----------------------------------------------------------------------------------------------------------

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOW = np.array([-1.91986, -1.74533, -1.69, -1.65806, -2.74385, -0.174533])
HIGH = np.array([1.91986, 1.74533, 1.69, 1.65806, 2.84121, 1.745329])


class ArmLink(NamedTuple):
    """The frame of a body in that of the body before it; its joint turns it about its z axis."""

    name: str
    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float]  # w, x, y, z


_H = float(np.sqrt(0.5))
LINKS = (
    ArmLink("shoulder", (0.0388353, 0.0, 0.0624), (0.0, 0.0, 1.0, 0.0)),
    ArmLink("upper_arm", (-0.0303992, -0.0182778, -0.0542), (0.5, -0.5, -0.5, -0.5)),
    ArmLink("lower_arm", (-0.11257, -0.028, 0.0), (_H, 0.0, 0.0, _H)),
    ArmLink("wrist", (-0.1349, 0.0052, 0.0), (_H, 0.0, 0.0, -_H)),
    ArmLink("gripper", (0.0, -0.0611, 0.0181), (0.0172091, -0.0172091, 0.706897, 0.706897)),
    ArmLink("moving_jaw", (0.0202, 0.0188, -0.0234), (_H, _H, 0.0, 0.0)),
)
FRAME = (-0.0079, -0.000218121, -0.0981274)  # the published "gripperframe", in the gripper's frame: its fixed jaw's tip
PINCH = np.array([0.0101, -0.0002, -0.0885])  # in the gripper's frame: the centre of a cube that it holds
_STEPS, _DAMPING, _LONGEST = 12, 1e-6, 0.3  # of the solver; its longest step in radians


def closing_angle(opening: Any) -> Any:
    """The gripper joint's angle in radians for an ``opening`` from 0 (closed) to 1: an array or a number."""
    return float(LOW[5]) + opening * float(HIGH[5] - LOW[5])


def opening_of(angle: Any) -> Any:
    """The opening of the gripper, of which :func:`closing_angle` is the angle."""
    return (angle - float(LOW[5])) / float(HIGH[5] - LOW[5])


def pinch_point(joints: np.ndarray) -> np.ndarray:
    """[E,3]: where a cube's centre is held, for ``joints`` [E,5 or more] in radians."""
    rotation, origin, _, _ = _forward(joints)
    return np.asarray(origin + rotation @ PINCH)


def solve(places: np.ndarray, roll: np.ndarray | float = 0.0) -> np.ndarray:
    """[E,5]: joints that bring the pinch point to ``places`` [E,3] with the gripper pointing down, or nearly.

    Damped least squares (Wampler 1986) from a pose in the middle, for three coordinates and the gripper's pitch, which
    is the sum of three joints.  Where the wrist cannot bend as far, the gripper points ahead; a place out of reach is
    approached.
    """
    joints = np.tile(_MIDDLE, (len(places), 1))
    joints[:, 0], joints[:, 4] = -np.arctan2(places[:, 1], places[:, 0] - LINKS[0].position[0]), roll
    for _ in range(_STEPS):
        rotation, origin, axes, origins = _forward(joints)
        point = origin + rotation @ PINCH
        pitch = _DOWN - joints[:, 1:4].sum(1)
        free = (joints[:, 3] < HIGH[3]) | (pitch < 0)  # to bend the wrist further
        missing = np.concatenate([places - point, (pitch * free)[:, None]], axis=1)
        jacobian = np.zeros((len(places), 4, 4))
        jacobian[:, :3] = np.cross(axes[:, :4], point[:, None] - origins[:, :4]).transpose(0, 2, 1)
        jacobian[:, 3, 1:] = free[:, None]
        jacobian[:, :, 3] *= free[:, None]
        transposed = jacobian.transpose(0, 2, 1)
        step = transposed @ np.linalg.solve(jacobian @ transposed + _DAMPING * np.eye(4), missing[..., None])
        joints[:, :4] += np.clip(step[..., 0], -_LONGEST, _LONGEST)
        joints[:, :4] = np.clip(joints[:, :4], LOW[:4], HIGH[:4])
    return joints


def _forward(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The gripper's rotation [E,3,3] and origin [E,3]; axes and origins [E,5,3] of the five joints before the jaw."""
    rotation, origin = np.tile(np.eye(3), (len(joints), 1, 1)), np.zeros((len(joints), 3))
    axes, origins = np.empty((len(joints), 5, 3)), np.empty((len(joints), 5, 3))
    for i, link in enumerate(LINKS[:5]):
        origin = origin + rotation @ np.array(link.position)
        rotation = rotation @ _matrix(link.quaternion)
        axes[:, i], origins[:, i] = rotation[:, :, 2], origin
        cos, sin = np.cos(joints[:, i]), np.sin(joints[:, i])
        turn = np.zeros((len(joints), 3, 3))
        turn[:, 0, 0], turn[:, 0, 1], turn[:, 1, 0], turn[:, 1, 1], turn[:, 2, 2] = cos, -sin, sin, cos, 1.0
        rotation = rotation @ turn
    return rotation, origin, axes, origins


def _matrix(quaternion: tuple[float, float, float, float]) -> np.ndarray:
    w, x, y, z = np.array(quaternion) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


_DOWN = np.pi / 2
_MIDDLE = np.array([0.0, 0.0, 0.0, np.pi / 2, 0.0])


RATES = (20, 25, 40, 50)  # Hz, that whole physics steps make
REACH = (0.16, 0.25)  # metres from the axis of shoulder_pan, within which cubes lie
SIDE = 0.6  # radians to either side, within which cubes lie
ROLL = np.pi / 2  # of the wrist: the jaws open across the picture of the camera "front"
_BEYOND = 0.1  # radians by which a joint may be pushed beyond its limits before its measurement is clipped
_AXIS = LINKS[0].position[0]
_NAMES = tuple(f"{joint}.pos" for joint in JOINTS)
_UNITS = "rad,rad,rad,rad,rad,1"
_START_LOW, _START_HIGH = np.array([0.16, -0.09, 0.08]), np.array([0.24, 0.09, 0.14])  # metres, of the pinch point
_WITHIN = np.array([0.13, -0.20, 0.02]), np.array([0.25, 0.20, 0.16])
_OPEN = (0.45, 0.65)  # of the gripper at the start
_GAP = (0.0281, -0.00906, 0.04789)  # metres: the middle of the moving jaw's face turns about its joint


class So101(Robot):
    """Absolute targets of the six joints, and their measured positions; the gripper as an opening from 0 to 1."""

    first_cube = len(JOINTS)

    def __init__(self, control_hz: int = 25) -> None:
        """Raises UserError for a rate that is not among ``RATES``."""
        if control_hz not in RATES:
            raise UserError(
                f"control_hz={control_hz} is no whole number of physics steps of {1000 * PHYSICS_DT:g} ms, so the arm "
                f"cannot be commanded at that rate; give one of {', '.join(map(str, RATES))}."
            )
        self.substeps = round(1 / (control_hz * PHYSICS_DT))
        low, high = (*LOW[:5].tolist(), 0.0), (*HIGH[:5].tolist(), 1.0)
        lower, higher = tuple(x - _BEYOND for x in low), tuple(x + _BEYOND for x in high)
        state = ArraySpec((6,), "float32", lower, higher, unit=_UNITS, names=_NAMES)
        super().__init__(state, ArraySpec((6,), "float32", low, high, unit=_UNITS, names=_NAMES))

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The compiled scene; ``qpos[0:6]`` are the joints in the order of ``JOINTS``, then come the cubes."""
        links = ""
        for link, joint, low, high in reversed(list(zip(LINKS, JOINTS, LOW, HIGH, strict=True))):
            inertial, shape = _BODIES[link.name]
            links = _LINK.format(
                name=link.name,
                position=_numbers(link.position),
                quaternion=_numbers(link.quaternion),
                joint=joint,
                low=low,
                high=high,
                inertial=inertial,
                shape=shape.format(frame=_numbers(FRAME), wrist=_WRIST),
                rest=links,
            )
        servos = (
            _SERVO.format(name=name, low=low, high=high) for name, low, high in zip(JOINTS, LOW, HIGH, strict=True)
        )
        actuators = "<actuator>" + "".join(servos) + "</actuator>"
        robot = RobotText("so101", CAMERAS, _MAT, _DEFAULTS, _BASE.format(links=links), actuators)
        return compile_scene(robot, cubes, marks)

    def draw_places(self, count: int, rng: Generators) -> np.ndarray:
        away, angle = rng.uniform(*REACH, (count,)), rng.uniform(-SIDE, SIDE, (count,))
        return np.stack([_AXIS + away * np.cos(angle), away * np.sin(angle)], axis=2)

    def start(self, qpos: np.ndarray, rng: Generators) -> np.ndarray:
        """It points down."""
        qpos[:, :5] = solve(rng.uniform(_START_LOW, _START_HIGH, (3,)), ROLL)
        qpos[:, 5] = closing_angle(rng.uniform(*_OPEN))
        return qpos[:, :6].copy()

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, shift: np.ndarray) -> None:
        moved = pinch_point(qpos[:, :5]) + shift
        qpos[:, :5] = ctrl[:, :5] = solve(np.clip(moved, *_WITHIN), qpos[:, 4])

    def control(self, ctrl: Array, action: Array) -> Array:
        """The joints' targets are the action; the gripper's is an angle."""
        xp = array_namespace(action)
        action = xp.astype(action, ctrl.dtype)
        return xp.concat([action[:, :5], closing_angle(action[:, 5:6])], axis=1)

    def measured(self, qpos: Array, ctrl: Array) -> Array:
        """The joints' positions, and the opening of the gripper."""
        return array_namespace(qpos).concat([qpos[:, :5], opening_of(qpos[:, 5:6])], axis=1)

    def opening(self, qpos: Array) -> Array:
        """Metres between the jaws at the middle of the moving one."""
        xp, angle = array_namespace(qpos), qpos[:, 5]
        return _GAP[0] + _GAP[1] * xp.cos(angle) + _GAP[2] * xp.sin(angle)


# "front" looks at the arm from ahead and above; "wrist" is fixed to the gripper and looks at what it holds.
CAMERAS = {"front": 'pos="0.56 0 0.36" xyaxes="0 1 0 -0.55 0 0.835" fovy="46"'}
_WRIST = '<camera name="wrist" pos="0.0101 -0.062 -0.012" xyaxes="1 0 0 0 0.777 0.630" fovy="58"/>'

_MAT = 'size="0.08 0.165 0.0004" pos="0.215 0 0"'

# The servo is a Feetech STS3215 at 7.4 V: friction, inertia of its gears and torque limit are the published model's.
# Its gains there, 998.22 and 2.731, overshoot a step by a quarter; with these it arrives as the real servo does.
_DEFAULTS = """<default class="servo"><joint damping="0.60" frictionloss="0.052" armature="0.028"/></default>
    <default class="printed"><geom contype="0" conaffinity="0" mass="0" rgba="0.93 0.76 0.16 1"/></default>
    <default class="motor"><geom contype="0" conaffinity="0" mass="0" type="box" rgba="0.13 0.13 0.14 1"/></default>
    <default class="jaw">
      <geom type="box" mass="0" rgba="0.93 0.76 0.16 1" friction="1.2 0.02 0.001" condim="4" solref="0.01 1"/>
    </default>"""
_SERVO = '<position name="{name}" joint="{name}" kp="250" kv="5" forcerange="-2.94 2.94" ctrlrange="{low} {high}"/>'

_BASE = """<body name="base">
      <geom class="printed" type="box" size="0.050 0.030 0.010" pos="0.005 0 0.010"/>
      <geom class="printed" type="box" size="0.032 0.026 0.022" pos="0.030 0 0.040"/>
      <geom class="motor" size="0.020 0.013 0.018" pos="-0.005 0 0.036"/>
      {links}
    </body>"""

# What each body looks like and weighs: mass (kg), centre and inertia (xx yy zz xy xz yz) of the published model.
_BODIES = {
    "shoulder": (
        'pos="-0.0307604 -0.0000167 -0.0252713" mass="0.100006" '
        'fullinertia="8.376e-05 8.104e-05 2.398e-05 7.555e-08 -1.163e-06 1.547e-07"',
        """<geom class="printed" type="cylinder" size="0.024 0.006" pos="0 0 -0.006"/>
      <geom class="printed" type="box" size="0.022 0.024 0.022" pos="-0.016 0 -0.032"/>
      <geom class="motor" size="0.013 0.027 0.020" pos="-0.0304 0 -0.048"/>""",
    ),
    "upper_arm": (
        'pos="-0.0898471 -0.00838224 0.0184089" mass="0.103" '
        'fullinertia="4.080e-05 1.473e-04 1.425e-04 -1.979e-05 -4.030e-08 8.973e-09"',
        """<geom class="printed" type="capsule" size="0.013" fromto="0 0 0.0183 -0.100 -0.020 0.0183"/>
      <geom class="motor" size="0.013 0.020 0.018" pos="-0.1126 -0.0225 0.0183"/>""",
    ),
    "lower_arm": (
        'pos="-0.0980701 0.00324376 0.0182831" mass="0.104" '
        'fullinertia="2.874e-05 1.598e-04 1.453e-04 7.412e-06 1.264e-06 -4.901e-08"',
        """<geom class="printed" type="capsule" size="0.012" fromto="0 0 0.0183 -0.125 0.005 0.0183"/>
      <geom class="motor" size="0.020 0.013 0.018" pos="-0.124 0.0052 0.0183"/>""",
    ),
    "wrist": (
        'pos="-0.000103312 -0.0386143 0.0281156" mass="0.079" '
        'fullinertia="3.683e-05 2.539e-05 2.100e-05 1.789e-08 -5.281e-08 3.641e-06"',
        """<geom class="printed" type="box" size="0.016 0.016 0.014" pos="0 -0.014 0.0181"/>
      <geom class="motor" size="0.013 0.019 0.018" pos="0 -0.042 0.0181"/>""",
    ),
    "gripper": (
        'pos="0.000213627 0.000245138 -0.025187" mass="0.087" '
        'fullinertia="2.751e-05 4.337e-05 3.450e-05 -3.352e-07 -5.736e-06 -5.180e-08"',
        """<geom class="motor" size="0.016 0.018 0.014" pos="0.006 0 -0.018" contype="1" conaffinity="1"/>
      <geom class="printed" type="box" size="0.008 0.010 0.012" pos="-0.012 0 -0.030"/>
      <geom class="jaw" name="fixed_jaw" size="0.004 0.010 0.031" pos="-0.0119 0 -0.0705"/>
      <site name="gripperframe" pos="{frame}" size="0.002" rgba="0 0 0 0"/>
      {wrist}""",
    ),
    "moving_jaw": (
        'pos="-0.00157495 -0.0300244 0.0192755" mass="0.012" '
        'fullinertia="6.614e-06 1.890e-06 5.287e-06 -3.198e-07 -5.907e-09 -1.099e-07"',
        """<geom class="printed" type="box" size="0.006 0.012 0.011" pos="0 -0.006 0.0188"/>
      <geom class="jaw" name="moving_jaw" size="0.004 0.030 0.010" pos="-0.0053 -0.0493 0.0188" euler="0 0 -0.35"/>""",
    ),
}
_LINK = """<body name="{name}" pos="{position}" quat="{quaternion}">
      <joint class="servo" name="{joint}" axis="0 0 1" range="{low} {high}"/>
      <inertial {inertial}/>
      {shape}
      {rest}
    </body>"""


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)
