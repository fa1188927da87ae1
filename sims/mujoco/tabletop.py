"""Base of the tabletop's tasks: the scene, robots, the gantry gripper, the placement of objects, scripted experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import atan2, hypot, pi
from typing import Literal

import mujoco
import numpy as np
from array_api_compat import array_namespace, device

from sims.mujoco.generators import Generators
from sims.mujoco.scene import (
    CUBE_EDGE,
    CUBES_QPOS,
    FINGER_OPEN,
    FINGER_QPOS,
    GANTRY_QPOS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    build_model,
)
from sims.mujoco.task import Constant, Episodes, Task, TaskResult, TaskState, first_case
from vla_rl.contract.env import Array, ArraySpec, Observation, on_host
from vla_rl.contract.errors import UserError

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.10),
    "green": (0.10, 0.62, 0.18),
    "blue": (0.10, 0.28, 0.90),
    "yellow": (0.95, 0.78, 0.08),
    "purple": (0.55, 0.15, 0.70),
    "orange": (0.95, 0.45, 0.05),
}
TARGET_COLOUR, UNSEEN = len(COLOURS), -1  # of the mark that cubes are pushed to; of objects that are not on the table
SPACING = 0.078  # metres between centres, so that the open fingers fit between two cubes
YAW = 0.55  # radians
HOLD_STEPS = 5  # consecutive control steps after which a condition counts
LIFT_HEIGHT = 0.06  # metres, of a cube's centre above the table
_AWAY = np.array([0.0, -1.2])  # metres; unused cubes of an episode lie there, behind the camera
_PALETTE = Constant([*((*rgb, 1.0) for rgb in COLOURS.values()), (0.13, 0.13, 0.16, 1.0), (0, 0, 0, 0)], np.float32)

Instruct = Literal["target", "distractor"]


class Tabletop(Task):
    """``cubes`` cubes and ``marks`` flat round marks on the table, under the gripper.

    Marks have no contact: they are plates, or the target of a push.  Every task's state has ``colour`` int8 [cubes],
    the index of each cube's colour in ``COLOURS`` (``UNSEEN``: not part of the episode); tasks with marks also have
    ``mark_colour`` int8 [marks] and ``mark_xy`` float64 [marks,2] in metres.
    """

    def __init__(self, cubes: int, marks: int = 0, robot: Robot | None = None, deadline: int | None = None) -> None:
        """``robot``: what moves the cubes, a gantry unless given; ``deadline``: see :meth:`result`."""
        self.robot: Robot = robot or Gantry()
        self._deadline = deadline
        self.model = self.robot.build_model(cubes, marks)
        self.state, self.action, self.substeps = self.robot.state, self.robot.action, self.robot.substeps
        self.painted = tuple(self.model.geom(f"cube{i}").id for i in range(cubes))
        self.placed = tuple(self.model.geom(f"mark{i}").id for i in range(marks))
        self.painted += self.placed
        self.movable: tuple[int, ...] = tuple(self.model.body(f"cube{i}").id for i in range(cubes))
        self.surfaces: tuple[int, ...] = (self.model.geom("table").id, self.model.geom("mat").id)
        self._cubes, self._marks = cubes, marks
        self.place = ArraySpec((3,), "float32", -10.0, 10.0, unit="m", frame="table", names=("x", "y", "z"))

    def place_extras(self, *names: str) -> dict[str, ArraySpec]:
        """The specs of ``privileged/cubes``, all cubes' places flat, and of the places ``privileged/NAME``."""
        cubes = replace(self.place, shape=(self._cubes * 3,), names=())
        return {"privileged/cubes": cubes} | {f"privileged/{name}": self.place for name in names}

    def blank_state(self, count: int) -> TaskState:
        """``task_state`` of ``count`` environments, to be filled by ``sample_episodes``."""
        return {name: np.repeat(value[None], count, axis=0) for name, value in self.task_state.items()}

    def blank_episodes(self, count: int) -> Episodes:
        """``count`` episodes, to be put in."""
        return Episodes(np.zeros((count, self.model.nq)), np.zeros((count, self.model.nu)), self.blank_state(count))

    def scene_state(self) -> TaskState:
        """An example of the entries of the task state that describe the scene."""
        task_state: TaskState = {"colour": np.full(self._cubes, UNSEEN, np.int8)}
        if self._marks:
            task_state["mark_colour"] = np.full(self._marks, UNSEEN, np.int8)
            task_state["mark_xy"] = np.zeros((self._marks, 2))
        return task_state

    def place_cubes(self, xy: np.ndarray, rng: Generators) -> np.ndarray:
        """``qpos`` [R,nq] with resting cubes, turned at random, at ``xy`` [R,n,2]; the other cubes are away."""
        qpos, shown = np.zeros((len(xy), self.model.nq)), xy.shape[1]
        poses, half = self._poses(qpos), rng.uniform(-YAW, YAW, (self._cubes,)) / 2
        poses[:, :shown, :2], poses[:, shown:, :2] = xy, _AWAY + np.outer(np.arange(shown, self._cubes), [0.15, 0.0])
        poses[..., 2], poses[..., 3], poses[..., 6] = CUBE_EDGE / 2, np.cos(half), np.sin(half)
        return qpos

    def vary_poses(self, episodes: Episodes, values: Mapping[str, np.ndarray]) -> Episodes:
        """``episodes`` with their objects moved and turned, and the gripper started elsewhere within the workspace."""
        qpos, ctrl = episodes.qpos.copy(), episodes.ctrl.copy()
        task_state = {name: np.copy(value) for name, value in episodes.task_state.items()}
        poses, seen = self._poses(qpos), task_state["colour"] != UNSEEN
        shift = np.stack([values["object_x"], values["object_y"]], axis=1)[:, None]
        poses[..., :2] += np.where(seen[..., None], shift, 0.0)
        poses[..., 3:] = np.where(seen[..., None], _turned(poses[..., 3:], values["object_yaw"]), poses[..., 3:])
        if self._marks:
            task_state["mark_xy"] += np.where(task_state["mark_colour"][..., None] != UNSEEN, shift, 0.0)
        self.robot.displace(qpos, ctrl, np.stack([values[f"gripper_{axis}"] for axis in "xyz"], axis=1))
        return Episodes(qpos, ctrl, task_state)

    def result(self, task_state: TaskState, success: Array, failed: Sequence[Array], **changed: Array) -> TaskResult:
        """Success earns 1; ``failed`` [R] are the cases of ``failures``, of which the first that holds counts.

        The last of ``failures`` is that the episode is unfinished at its deadline.  ``changed`` are entries of the task
        state after this step; its "steps" are counted here.
        """
        xp = array_namespace(success)
        steps = xp.astype(task_state["steps"] + 1, xp.int16)
        late = steps >= self._deadline if self._deadline else xp.zeros_like(success)
        cases = [(success, -1), *((case, number) for number, case in enumerate([*failed, late]))]
        after = {**task_state, **changed, "steps": steps}
        return TaskResult(xp.astype(success, xp.float32), success, first_case(cases), after)

    def control(self, ctrl: Array, action: Array) -> Array:
        return self.robot.control(ctrl, action)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        return self.robot.proprioception(qpos, ctrl)

    def flat_cubes(self, qpos: Array) -> Array:
        """float32 [R,3*cubes]: :meth:`cubes` as the extra ``privileged/cubes``."""
        return array_namespace(qpos).reshape(self.cubes(qpos), (qpos.shape[0], 3 * self._cubes))

    def cubes(self, qpos: Array) -> Array:
        """Centres of all cubes, float32 [R,cubes,3] metres."""
        xp = array_namespace(qpos)
        return xp.astype(xp.clip(self.centres(qpos), -10, 10), xp.float32)

    def centres(self, qpos: Array) -> Array:
        """[R,cubes,3]: centres of all cubes as the simulator has them, metres."""
        return self._poses(qpos)[..., :3]

    def _poses(self, qpos: Array) -> Array:
        """[R,cubes,7]: position (metres) and quaternion (w,x,y,z) of all cubes, sharing memory with ``qpos`` [R,nq]."""
        start = self.robot.first_cube
        poses = qpos[:, start : start + 7 * self._cubes]
        return array_namespace(qpos).reshape(poses, (qpos.shape[0], self._cubes, 7))

    def colours(self, task_state: TaskState) -> Array:
        parts = [task_state[name] for name in ("colour", "mark_colour") if name in task_state]
        xp = array_namespace(*parts)
        return _PALETTE.beside(parts[0])[xp.astype(xp.concat(parts, axis=1), xp.int64)]

    def mark_positions(self, task_state: TaskState) -> Array:
        colour = task_state["colour"]
        xp = array_namespace(colour)
        if not self._marks:
            return xp.empty((colour.shape[0], 0, 3), dtype=xp.float64, device=device(colour))
        xy = task_state["mark_xy"]
        height = xp.full((*xy.shape[:2], 1), 0.001, dtype=xy.dtype, device=device(xy))
        return xp.concat([xy, height], axis=2)


def count_consecutive(condition: Array, before: Array) -> Array:
    """int16: consecutive control steps with ``condition``, given ``before`` up to the previous step."""
    xp = array_namespace(condition)
    return xp.astype(xp.where(condition, before + 1, xp.zeros_like(before)), xp.int16)


def _turned(quaternion: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    """``quaternion`` [R,n,4] (w,x,y,z) of upright cubes, turned by ``yaw`` [R] (radians) about the vertical."""
    w, z, half = quaternion[..., 0], quaternion[..., 3], yaw[:, None] / 2
    cos, sin, zero = np.cos(half), np.sin(half), np.zeros_like(w)
    return np.stack([w * cos - z * sin, zero, zero, w * sin + z * cos], axis=-1)


def check_variant(
    task: str, cubes: int, most: int, colours: int, instruct: str, fewest: tuple[int, int] = (2, 4)
) -> None:
    """Raise UserError for a number of cubes or colours, or an ``instruct``, that ``task`` does not have.

    ``fewest`` cubes and colours.
    """
    if (
        not fewest[0] <= cubes <= most
        or not max(cubes, fewest[1]) <= colours <= len(COLOURS)
        or instruct not in ("target", "distractor")
    ):
        raise UserError(
            f"{task} has no variant cubes={cubes}, colours={colours}, instruct={instruct!r}, so it cannot be made; "
            f"give {fewest[0]} to {most} cubes, {fewest[1]} to {len(COLOURS)} colours, and instruct "
            "'target' or 'distractor'."
        )


class Robot:
    """A robot over the cubes and marks of a table.

    All methods work on ``R`` environments at once: those that draw or displace on the host, ``control``,
    ``proprioception`` and ``opening`` on arrays of numpy or of torch.
    """

    substeps: int  # physics steps per control step
    first_cube: int  # first entry of the first cube in ``qpos``

    def __init__(self, state: ArraySpec, action: ArraySpec) -> None:
        """``state`` and ``action``: the specs of what it measures and is commanded."""
        self.state, self.action = state, action
        self._bounds = Constant(state.low, np.float32), Constant(state.high, np.float32)

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The compiled scene, with geoms and bodies ``cube0``, ..., ``mark0``, ..., ``table`` and ``mat``."""
        raise NotImplementedError

    def draw_places(self, count: int, rng: Generators) -> np.ndarray:
        """``count`` places [R,count,2] in metres within reach."""
        raise NotImplementedError

    def start(self, qpos: np.ndarray, rng: Generators) -> np.ndarray:
        """Put the robot, open, above the cubes, into ``qpos`` [R,nq]; returns the matching ``ctrl`` [R,nu]."""
        raise NotImplementedError

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, shift: np.ndarray) -> None:
        """Move the gripper's start in ``qpos`` and ``ctrl`` by ``shift`` [R,3] metres, within its workspace."""
        raise NotImplementedError

    def control(self, ctrl: Array, action: Array) -> Array:
        """The actuator targets [R,nu] after ``action`` [R,D], which is within bounds."""
        raise NotImplementedError

    def measured(self, qpos: Array, ctrl: Array) -> Array:
        """[R,S]: the entries of ``state``, which may exceed its bounds."""
        raise NotImplementedError

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the fingers."""
        raise NotImplementedError

    def scatter(self, count: int, spacing: np.ndarray | float, rng: Generators) -> np.ndarray:
        """``count`` places [R,count,2] in metres within reach, at least ``spacing`` (or [count,count]) apart."""

        one, other = np.triu_indices(count, 1)
        least = np.broadcast_to(spacing, (count, count))[one, other]

        def apart(xy: np.ndarray) -> np.ndarray:
            gap = xy[:, one] - xy[:, other]
            return np.asarray((np.sqrt(gap[..., 0] ** 2 + gap[..., 1] ** 2) >= least).all(1))

        return rng.until(apart, lambda rows: self.draw_places(count, rows))

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,S], within the bounds of ``state``."""
        xp, (low, high) = array_namespace(qpos), (bound.beside(qpos) for bound in self._bounds)
        return xp.minimum(xp.maximum(xp.astype(self.measured(qpos, ctrl), xp.float32), low), high)


SPREAD = 0.13  # metres; objects start within +-SPREAD in x and y
_START_LOW, _START_HIGH = np.array([-0.12, -0.12, 0.07]), np.array([0.12, 0.12, 0.15])  # metres, of the gripper
MOST_DISPLACEMENT = 0.03  # metres per control step and axis
_LOW, _HIGH = Constant(WORKSPACE_LOW), Constant(WORKSPACE_HIGH)


class Gantry(Robot):
    """Its actions displace the position target and open or close the fingers."""

    substeps = 12
    first_cube = CUBES_QPOS

    def __init__(self) -> None:
        low, high, gap = tuple(WORKSPACE_LOW.tolist()), tuple(WORKSPACE_HIGH.tolist()), 2 * FINGER_OPEN
        around = 0.02  # metres by which the gantry may overshoot its target or be pushed off it
        state = ArraySpec(
            (8,),
            "float32",
            low=(*(x - around for x in low), -0.01, *low, 0.0),
            high=(*(x + around for x in high), gap + 0.01, *high, gap),
            unit="m",
            frame="table",
            names=("x", "y", "z", "opening", "target_x", "target_y", "target_z", "target_opening"),
        )
        bound, names = (MOST_DISPLACEMENT,) * 3 + (1.0,), ("dx", "dy", "dz", "grip")
        lowest = tuple(-b for b in bound)
        super().__init__(state, ArraySpec((4,), "float32", lowest, bound, unit="m,m,m,1", frame="table", names=names))

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        return build_model(cubes, marks)

    def draw_places(self, count: int, rng: Generators) -> np.ndarray:
        return rng.uniform(-SPREAD, SPREAD, (count, 2))

    def start(self, qpos: np.ndarray, rng: Generators) -> np.ndarray:
        start = rng.uniform(_START_LOW, _START_HIGH, (3,))
        qpos[:, GANTRY_QPOS], qpos[:, FINGER_QPOS] = start, FINGER_OPEN
        return np.column_stack([start, np.full(len(start), FINGER_OPEN)])

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, shift: np.ndarray) -> None:
        qpos[:, GANTRY_QPOS] = ctrl[:, :3] = np.clip(qpos[:, GANTRY_QPOS] + shift, WORKSPACE_LOW, WORKSPACE_HIGH)

    def control(self, ctrl: Array, action: Array) -> Array:
        xp = array_namespace(ctrl)
        target = xp.minimum(xp.maximum(ctrl[:, :3] + action[:, :3], _LOW.beside(ctrl)), _HIGH.beside(ctrl))
        open_ = xp.full((ctrl.shape[0], 1), FINGER_OPEN, dtype=target.dtype, device=device(ctrl))
        return xp.concat([target, xp.where(action[:, 3:] > 0, xp.zeros_like(open_), open_)], axis=1)

    def measured(self, qpos: Array, ctrl: Array) -> Array:
        """Pinch point and opening, then their commanded values; metres."""
        xp = array_namespace(qpos)
        opening = xp.sum(qpos[:, FINGER_QPOS], axis=1, keepdims=True)
        return xp.concat([qpos[:, GANTRY_QPOS], opening, ctrl[:, :3], 2 * ctrl[:, 3:4]], axis=1)

    def opening(self, qpos: Array) -> Array:
        return array_namespace(qpos).sum(qpos[:, FINGER_QPOS], axis=1)


# -- the Franka arm of other simulators --------------------------------------------------------------------------------

FRANKA_JOINTS = 7  # joints; then two fingers

# From the base to the flange, metres (franka_emika_panda of MuJoCo Menagerie and of ManiSkill).
_SHOULDER, _UPPER, _ELBOW, _LOWER, _WRIST, _FLANGE = 0.333, 0.316, 0.0825, 0.384, 0.088, 0.107
_HAND_TURN = pi / 4  # of the last joint, for fingers that open across the picture when the arm is straight


def franka_joints(pinch: Array, base: tuple[float, float], pads: float) -> Array:
    """The seven joints [R,7] (radians) of a Franka arm whose gripper points straight down at ``pinch`` [R,3].

    The arm stands beyond the table and faces the camera, so that it hides no cube.  Its shoulder stays in the vertical
    plane through its base and the gripper (joints 3 and 5 at 0), where two links with a right angle at the elbow reach
    the wrist: the law of cosines gives the joints, without iterations and for every position the same.

    base  where the arm stands, (x, y)
    pads  from the hand to the point between the finger pads; all in metres
    """
    xp = array_namespace(pinch)
    x, y, z = pinch[:, 0], pinch[:, 1], pinch[:, 2]
    forward, left = base[1] - y, x - base[0]  # in the base's frame
    reach = xp.hypot(forward, left) - _WRIST
    height = z + pads + _FLANGE - _SHOULDER
    upper, lower = hypot(_UPPER, _ELBOW), hypot(_LOWER, _ELBOW)
    distance = xp.hypot(reach, height)
    at_shoulder = xp.acos((distance**2 + upper**2 - lower**2) / (2 * distance * upper))
    at_elbow = xp.acos((upper**2 + lower**2 - distance**2) / (2 * upper * lower))
    turn = xp.atan2(left, forward)
    # The links bend by the elbow's offset: straight lines between the joints are turned by fixed angles.
    bends = atan2(_ELBOW, _UPPER), atan2(_ELBOW, _LOWER)
    shoulder = xp.atan2(reach, height) - at_shoulder - bends[0]
    elbow = at_elbow - pi - sum(bends)
    wrist = shoulder - elbow  # so that the hand points down
    zero = xp.zeros_like(turn)
    return xp.stack([turn, shoulder, zero, elbow, zero, wrist, turn + _HAND_TURN], axis=1)


# -- scripted experts --------------------------------------------------------------------------------------------------

TRAVEL_HEIGHT = 0.075  # metres of the pinch point: the fingertips pass above standing cubes
GRASP_HEIGHT = 0.018
FUNNEL = 0.012  # metres beside the cube within which the gripper may descend
STRIDE = np.array([0.022, 0.022, 0.018])  # metres per control step and axis, less than an action can be


@dataclass(frozen=True)
class Situation:
    """Positions in ``E`` environments, in metres.

    pinch, target, cube, goal [E,3]: the pinch point, its commanded position, the named cube, and the goal of the cube
    opening [E]: between the fingers; closing bool [E]: the fingers are commanded to close
    """

    pinch: np.ndarray
    opening: np.ndarray
    target: np.ndarray
    closing: np.ndarray
    cube: np.ndarray
    goal: np.ndarray

    @classmethod
    def from_observation(cls, obs: Observation) -> Situation:
        """From an observation with ``privileged/target`` and, in tasks that have one, ``privileged/goal``."""
        state, cube = (on_host(item).astype(np.float64) for item in (obs.state, obs.extras["privileged/target"]))
        goal = on_host(obs.extras.get("privileged/goal", cube)).astype(np.float64)
        return cls(state[:, :3], state[:, 3], state[:, 4:7], state[:, 7] < FINGER_OPEN, cube, goal)

    @property
    def xy_distance(self) -> np.ndarray:
        """[E]: horizontal distance of pinch point and cube."""
        return np.asarray(np.linalg.norm(self.cube[:, :2] - self.pinch[:, :2], axis=1))

    @property
    def holding(self) -> np.ndarray:
        """bool [E]: the cube is between closing fingers."""
        above = np.abs(self.pinch[:, 2] - self.cube[:, 2])
        return self.closing & (self.opening < 0.05) & (self.xy_distance < 2 * FUNNEL) & (above < 0.018)

    def after(self, move: np.ndarray, grip: np.ndarray) -> Situation:
        """Prediction: the gripper reaches its target, and a cube between closed fingers moves with it."""
        held, target = self.closing & grip, self.target + move
        cube = self.cube + np.where(held[:, None], target - self.pinch, 0.0)
        return Situation(target, np.where(grip, 0.0, 2 * FINGER_OPEN), target, grip, cube, self.goal)


class TabletopExpert:
    """A scripted expert of the gantry.  It has no state: an action follows from the observation alone.

    It acts by a rule, which within a chunk gets the predicted situation after each action.
    """

    def __init__(self, horizon: int = 5) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,4] in metres and grip sign, from ``state`` and privileged positions."""
        situation = Situation.from_observation(obs)
        actions = np.empty((len(situation.pinch), self._horizon, 4), np.float32)
        for i in range(self._horizon):
            wanted, grip = self.rule(situation)
            move = np.clip(wanted, -STRIDE, STRIDE)
            actions[:, i, :3], actions[:, i, 3] = move, np.where(grip, 1.0, -1.0)
            situation = situation.after(move, grip)
        return actions

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        """Displacement of the target [E,3], which is clipped to a stride, and whether to grip [E]."""
        raise NotImplementedError


def grasp(situation: Situation) -> tuple[np.ndarray, np.ndarray]:
    """The goal of the pinch point [E,3] to grasp the cube, and whether the fingers should close [E]."""
    above = np.abs(situation.pinch[:, 2] - situation.cube[:, 2])
    grip = situation.holding | ((situation.xy_distance < FUNNEL / 2) & (above < 0.005))
    # The larger the distance, the higher the gripper stays: a funnel, so that the height is a function of the position.
    approach = np.clip(GRASP_HEIGHT + (situation.xy_distance - FUNNEL / 2) * 4.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([situation.cube[:, :2], approach])
    waiting = grip & ~situation.holding  # for the fingers to close
    goal[waiting] = situation.target[waiting]
    return goal, grip
