"""The arm on the tabletop: joint positions in, joint positions out (``sims.mujoco.robot.Robot``).

The tabletop with an arm like the SO-101, of primitive shapes, as MJCF text.

Frames, masses, inertias and servos are those of the published model (see ``arm.py``); shapes are ours: boxes and
cylinders of about the real parts' sizes, of which the two jaws and the gripper's motor touch things.
World frame: that of the arm's base, which stands on the table; x ahead of it, y to its left, z up; metres.
"""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.arrays import Constant
from sims.mujoco.scene import PHYSICS_DT, RobotText, compile_scene
from sims.mujoco.so101 import arm
from sims.mujoco.so101.arm import FRAME, HIGH, JOINTS, LINKS, LOW
from vla_rl.contract.env import Array, ArraySpec
from vla_rl.contract.errors import UserError

RATES = (20, 25, 40, 50)  # Hz, that whole physics steps make
REACH = (0.16, 0.25)  # metres from the axis of shoulder_pan, within which cubes lie
SIDE = 0.6  # radians to either side, within which cubes lie
ROLL = np.pi / 2  # of the wrist: the jaws open across the picture of the camera "front"
_AROUND = 0.1  # radians by which a joint may be pushed beyond its limits before its measurement is clipped
_AXIS = arm.LINKS[0].position[0]
_NAMES = tuple(f"{joint}.pos" for joint in arm.JOINTS)
_UNITS = "rad,rad,rad,rad,rad,1"
_START_LOW, _START_HIGH = np.array([0.16, -0.09, 0.08]), np.array([0.24, 0.09, 0.14])  # metres, of the pinch point
_WITHIN = np.array([0.13, -0.20, 0.02]), np.array([0.25, 0.20, 0.16])
_OPEN = (0.45, 0.65)  # of the gripper at the start
_GAP = (0.0281, -0.00906, 0.04789)  # metres: the middle of the moving jaw's face turns about its joint


class So101:
    """Absolute targets of the six joints, and their measured positions; the gripper as an opening from 0 to 1."""

    first_cube = len(arm.JOINTS)

    def __init__(self, control_hz: int = 25) -> None:
        """Raises UserError for a rate that is not among ``RATES``."""
        if control_hz not in RATES:
            raise UserError(
                f"control_hz={control_hz} is no whole number of physics steps of {1000 * PHYSICS_DT:g} ms, so the arm "
                f"cannot be commanded at that rate; give one of {', '.join(map(str, RATES))}."
            )
        self.substeps = round(1 / (control_hz * PHYSICS_DT))
        low, high = (*arm.LOW[:5].tolist(), 0.0), (*arm.HIGH[:5].tolist(), 1.0)
        self.action = ArraySpec((6,), "float32", low, high, unit=_UNITS, names=_NAMES)
        lower, higher = tuple(x - _AROUND for x in low), tuple(x + _AROUND for x in high)
        self.state = ArraySpec((6,), "float32", lower, higher, unit=_UNITS, names=_NAMES)
        self._state_low, self._state_high = Constant(lower, np.float32), Constant(higher, np.float32)

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The scene of ``so101/scene.py``."""
        return build_model(cubes, marks)

    def scatter(self, count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
        """``count`` places [count,2] in metres within reach, at least ``spacing`` (or [count,count]) apart."""
        while True:
            away, angle = rng.uniform(*REACH, count), rng.uniform(-SIDE, SIDE, count)
            xy = np.stack([_AXIS + away * np.cos(angle), away * np.sin(angle)], axis=1)
            gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1) + np.eye(count)
            if (gaps >= spacing).all():
                return xy

    def start(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The open gripper points down, somewhere above the cubes; returns the matching ``ctrl`` [6]."""
        joints = arm.solve(rng.uniform(_START_LOW, _START_HIGH)[None], ROLL)[0]
        qpos[:6] = [*joints, arm.closing_angle(rng.uniform(*_OPEN))]
        return qpos[:6].copy()

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, values: Mapping[str, float]) -> None:
        """Shift the pinch point's start within reach."""
        moved = arm.pinch_point(qpos[None, :5]) + np.array([values[f"gripper_{axis}"] for axis in "xyz"])
        qpos[:5] = ctrl[:5] = arm.solve(np.clip(moved, *_WITHIN), float(qpos[4]))[0]

    def control(self, ctrl: Array, action: Array) -> Array:
        """The joints' targets are the action; the gripper's is an angle."""
        xp = array_namespace(action)
        action = xp.astype(action, ctrl.dtype)
        return xp.concat([action[:, :5], arm.closing_angle(action[:, 5:6])], axis=1)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,6]: the joints' positions, and the opening of the gripper."""
        xp = array_namespace(qpos)
        state = xp.concat([qpos[:, :5], arm.opening(qpos[:, 5:6])], axis=1)
        low, high = self._state_low.beside(qpos), self._state_high.beside(qpos)
        return xp.minimum(xp.maximum(xp.astype(state, xp.float32), low), high)

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the jaws, at the middle of the moving one."""
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


def build_model(cubes: int, marks: int) -> mujoco.MjModel:
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
    servos = (_SERVO.format(name=name, low=low, high=high) for name, low, high in zip(JOINTS, LOW, HIGH, strict=True))
    actuators = "<actuator>" + "".join(servos) + "</actuator>"
    robot = RobotText("so101", CAMERAS, _MAT, _DEFAULTS, _BASE.format(links=links), actuators)
    return compile_scene(robot, cubes, marks)


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)
