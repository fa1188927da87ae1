"""Base of the tabletop's tasks: the scene, the gripper with its state and actions, and the placement of objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import mujoco
import numpy as np
from array_api_compat import array_namespace, device

from sims.mujoco.arrays import Constant
from sims.mujoco.robot import Robot
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
from sims.mujoco.task import Episode, TaskState
from vla_rl.contract.env import Array, ArraySpec
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


class Tabletop:
    """``cubes`` cubes and ``marks`` flat round marks on the table, under the gripper.

    Marks have no contact: they are plates, or the target of a push.  Every task's state has ``colour`` int8 [cubes],
    the index of each cube's colour in ``COLOURS`` (``UNSEEN``: not part of the episode); tasks with marks also have
    ``mark_colour`` int8 [marks] and ``mark_xy`` float64 [marks,2] in metres.
    """

    def __init__(self, cubes: int, marks: int = 0, robot: Robot | None = None) -> None:
        """``robot``: what moves the cubes, a gantry unless given."""
        self.robot: Robot = robot or Gantry()
        self.model = self.robot.build_model(cubes, marks)
        self.state, self.action, self.substeps = self.robot.state, self.robot.action, self.robot.substeps
        self.painted = tuple(self.model.geom(f"cube{i}").id for i in range(cubes))
        self.placed = tuple(self.model.geom(f"mark{i}").id for i in range(marks))
        self.painted += self.placed
        self.movable: tuple[int, ...] = tuple(self.model.body(f"cube{i}").id for i in range(cubes))
        self.surfaces: tuple[int, ...] = (self.model.geom("table").id, self.model.geom("mat").id)
        self._cubes, self._marks = cubes, marks
        self.place = ArraySpec((3,), "float32", -10.0, 10.0, unit="m", frame="table", names=("x", "y", "z"))

    def scene_state(self) -> TaskState:
        """An example of the entries of the task state that describe the scene."""
        task_state: TaskState = {"colour": np.full(self._cubes, UNSEEN, np.int8)}
        if self._marks:
            task_state["mark_colour"] = np.full(self._marks, UNSEEN, np.int8)
            task_state["mark_xy"] = np.zeros((self._marks, 2))
        return task_state

    def place_cubes(self, xy: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``qpos`` [nq] with resting cubes, turned at random, at ``xy`` [n,2]; the other cubes are away."""
        qpos = np.zeros(self.model.nq)
        rest = [_AWAY + np.array([0.15 * i, 0.0]) for i in range(len(xy), self._cubes)]
        write_cube_poses(qpos[self.robot.first_cube :], [*xy, *rest], rng.uniform(-YAW, YAW, self._cubes))
        return qpos

    def open_gripper(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put the open gripper somewhere above the cubes, into ``qpos``; returns the matching ``ctrl`` [nu]."""
        return self.robot.start(qpos, rng)

    def vary_poses(self, episode: Episode, values: Mapping[str, float]) -> Episode:
        """``episode`` with its objects moved and turned, and its gripper started elsewhere within the workspace."""
        qpos, ctrl = episode.qpos.copy(), episode.ctrl.copy()
        task_state = {name: np.copy(value) for name, value in episode.task_state.items()}
        shift = np.array([values["object_x"], values["object_y"]])
        for cube in np.flatnonzero(task_state["colour"] != UNSEEN):
            start = self.robot.first_cube + 7 * int(cube)
            qpos[start : start + 2] += shift
            qpos[start + 3 : start + 7] = _turned(qpos[start + 3 : start + 7], values["object_yaw"])
        if self._marks:
            task_state["mark_xy"][task_state["mark_colour"] != UNSEEN] += shift
        self.robot.displace(qpos, ctrl, values)
        return replace(episode, qpos=qpos, ctrl=ctrl, task_state=task_state)

    def control(self, ctrl: Array, action: Array) -> Array:
        """The robot's targets [R,nu] after ``action`` [R,D]."""
        return self.robot.control(ctrl, action)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,S]: what the robot measures."""
        return self.robot.proprioception(qpos, ctrl)

    def cubes(self, qpos: Array) -> Array:
        """Centres of all cubes, float32 [R,cubes,3] metres."""
        xp = array_namespace(qpos)
        return xp.astype(xp.clip(self.centres(qpos), -10, 10), xp.float32)

    def centres(self, qpos: Array) -> Array:
        """[R,cubes,3]: centres of all cubes as the simulator has them, metres."""
        start = self.robot.first_cube
        poses = qpos[:, start : start + 7 * self._cubes]
        return array_namespace(qpos).reshape(poses, (qpos.shape[0], self._cubes, 7))[..., :3]

    def colours(self, task_state: TaskState) -> Array:
        """float32 [R,cubes+marks,4] RGBA."""
        parts = [task_state[name] for name in ("colour", "mark_colour") if name in task_state]
        xp = array_namespace(*parts)
        return _PALETTE.beside(parts[0])[xp.astype(xp.concat(parts, axis=1), xp.int64)]

    def mark_positions(self, task_state: TaskState) -> Array:
        """float64 [R,marks,3]: positions of the marks, metres."""
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


def count_steps(task_state: TaskState, deadline: int | None) -> tuple[Array, Array]:
    """int16 [R]: control steps with this one, and bool [R]: whether an unfinished episode is too late now."""
    xp = array_namespace(task_state["steps"])
    steps = xp.astype(task_state["steps"] + 1, xp.int16)
    return steps, (steps >= deadline if deadline else xp.zeros_like(steps, dtype=xp.bool))


def write_cube_poses(poses: np.ndarray, xy: Sequence[np.ndarray], yaw: np.ndarray) -> None:
    """Write resting cubes at ``xy`` (metres), turned by ``yaw`` (radians), into ``poses`` [7*cubes]: part of a qpos."""
    for i, centre in enumerate(xy):
        half = yaw[i] / 2
        poses[7 * i : 7 * i + 7] = [*centre, CUBE_EDGE / 2, np.cos(half), 0.0, 0.0, np.sin(half)]


def _turned(quaternion: np.ndarray, yaw: float) -> np.ndarray:
    """``quaternion`` (w,x,y,z) of an upright cube, turned by ``yaw`` (radians) about the vertical."""
    w, _, _, z = quaternion
    cos, sin = np.cos(yaw / 2), np.sin(yaw / 2)
    return np.array([w * cos - z * sin, 0.0, 0.0, w * sin + z * cos])


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


SPREAD = 0.13  # metres; objects start within +-SPREAD in x and y
START = 0.12  # metres; the gripper starts within +-START in x and y
MOST_DISPLACEMENT = 0.03  # metres per control step and axis
_LOW, _HIGH = Constant(WORKSPACE_LOW), Constant(WORKSPACE_HIGH)


class Gantry:
    """Its actions displace the position target and open or close the fingers (``sims.mujoco.robot.Robot``)."""

    substeps = 12
    first_cube = CUBES_QPOS

    def __init__(self) -> None:
        low, high, gap = tuple(WORKSPACE_LOW.tolist()), tuple(WORKSPACE_HIGH.tolist()), 2 * FINGER_OPEN
        around = 0.02  # metres by which the gantry may overshoot its target or be pushed off it
        self.state = ArraySpec(
            (8,),
            "float32",
            low=(*(x - around for x in low), -0.01, *low, 0.0),
            high=(*(x + around for x in high), gap + 0.01, *high, gap),
            unit="m",
            frame="table",
            names=("x", "y", "z", "opening", "target_x", "target_y", "target_z", "target_opening"),
        )
        self._state_low, self._state_high = (Constant(x, np.float32) for x in (self.state.low, self.state.high))
        bound, names = (MOST_DISPLACEMENT,) * 3 + (1.0,), ("dx", "dy", "dz", "grip")
        lowest = tuple(-b for b in bound)
        self.action = ArraySpec((4,), "float32", lowest, bound, unit="m,m,m,1", frame="table", names=names)

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The scene of ``scene.py``."""
        return build_model(cubes, marks)

    def scatter(self, count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
        """``count`` places [count,2] in metres within ``SPREAD``, at least ``spacing`` (or [count,count]) apart."""
        return scatter(count, spacing, rng)

    def start(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put the open gripper somewhere above the cubes, into ``qpos``; returns the matching ``ctrl`` [nu]."""
        start = np.array([*rng.uniform(-START, START, 2), rng.uniform(0.07, 0.15)])
        qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = start, FINGER_OPEN
        return np.array([*start, FINGER_OPEN])

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, values: Mapping[str, float]) -> None:
        """Shift the gripper's start within its workspace."""
        moved = qpos[GANTRY_QPOS] + np.array([values[f"gripper_{axis}"] for axis in "xyz"])
        qpos[GANTRY_QPOS] = ctrl[:3] = np.clip(moved, WORKSPACE_LOW, WORKSPACE_HIGH)

    def control(self, ctrl: Array, action: Array) -> Array:
        """Move the position target by ``action``'s displacement and close the fingers where its grip is positive."""
        xp = array_namespace(ctrl)
        target = xp.minimum(xp.maximum(ctrl[:, :3] + action[:, :3], _LOW.beside(ctrl)), _HIGH.beside(ctrl))
        open_ = xp.full((ctrl.shape[0], 1), FINGER_OPEN, dtype=target.dtype, device=device(ctrl))
        return xp.concat([target, xp.where(action[:, 3:] > 0, xp.zeros_like(open_), open_)], axis=1)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,8]: pinch point and opening, then their commanded values; metres."""
        xp = array_namespace(qpos)
        opening = xp.sum(qpos[:, FINGER_QPOS], axis=1, keepdims=True)
        state = xp.concat([qpos[:, GANTRY_QPOS], opening, ctrl[:, :3], 2 * ctrl[:, 3:4]], axis=1)
        low, high = self._state_low.beside(qpos), self._state_high.beside(qpos)
        return xp.minimum(xp.maximum(xp.astype(state, xp.float32), low), high)

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the fingers."""
        return array_namespace(qpos).sum(qpos[:, FINGER_QPOS], axis=1)


def scatter(count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
    """``count`` positions [count,2] in metres within ``SPREAD``, at least ``spacing`` (or [count,count]) apart."""
    while True:
        xy = rng.uniform(-SPREAD, SPREAD, (count, 2))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1) + np.eye(count)
        if (gaps >= spacing).all():
            return xy
