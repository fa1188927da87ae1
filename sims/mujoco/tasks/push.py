"""Push: "push the cube to the target", a dark round mark on the table.

Success: for 5 control steps in a row, within 80, the cube rests on the table with its centre within 2.5 cm of the
target's.  Failure: the cube was lifted 6 cm ("lifted"); with ``deadline`` also an episode that takes longer
("too_late", as in lift).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, declare_mujoco, make_env
from sims.mujoco.generators import Generators
from sims.mujoco.tabletop import (
    COLOURS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    TARGET_COLOUR,
    TRAVEL_HEIGHT,
    Situation,
    Tabletop,
    TabletopExpert,
    count_consecutive,
)
from sims.mujoco.task import Episodes, TaskResult, TaskState
from sims.mujoco.tasks.place import NEAR, RESTING
from vla_rl.contract.env import Array
from vla_rl.contract.errors import UserError

WITHIN = 0.09  # metres; the cube and the target are within +-WITHIN, so that the gripper can get behind the cube
DISTANCE = (0.07, 0.13)  # metres between them
# Of the expert:
LOW = 0.018  # metres of the pinch point while pushing
BEHIND = 0.042  # metres between cube and pinch point before the push: clear of a turned cube's corner
CONTACT = 0.027  # metres between them while a face is pushed
ALIGNED = 0.010  # metres beside the line from cube to target
PUSH = 0.012  # metres per control step
ARRIVED = 0.008


class PushTask(Tabletop):
    """The rules of push; see the module's docstring and ``sims.mujoco.task.Task``."""

    name = "push"
    failures: tuple[str, ...] = ("lifted", "too_late")
    time_limit = 80

    def __init__(self, cubes: int = 1, marks: int = 1, deadline: int | None = None) -> None:
        if cubes < 1 or marks < 1:
            raise UserError(
                f"push with {cubes} cubes and {marks} marks has nothing to push; give at least one of each."
            )
        super().__init__(cubes, marks, deadline=deadline)
        self.texts: tuple[str, ...] = ("push the cube to the target",)
        self.families: tuple[str, ...] = (self.name,)
        self.task_state: TaskState = {
            **self.scene_state(),
            "steps": np.zeros((), np.int16),
            "at_target": np.zeros((), np.int16),  # control steps in a row that the cube was at the target
        }
        self.extras = self.place_extras("target", "goal")

    def sample_episodes(self, rng: Generators) -> Episodes:
        """A cube of any colour and the target at a distance; the open gripper above."""

        def good(xy: np.ndarray) -> np.ndarray:
            distance = np.linalg.norm(xy[:, 0] - xy[:, 1], axis=1)
            return np.asarray((distance >= DISTANCE[0]) & (distance <= DISTANCE[1]))

        task_state = self.blank_state(len(rng))
        xy = rng.until(good, lambda rows: rows.uniform(-WITHIN, WITHIN, (2, 2)))
        qpos = self.place_cubes(xy[:, :1], rng)
        ctrl = self.robot.start(qpos, rng)
        task_state["colour"][:, 0] = rng.integers(0, len(COLOURS))
        task_state["mark_colour"][:, 0], task_state["mark_xy"][:, 0] = TARGET_COLOUR, xy[:, 1]
        return Episodes(qpos, ctrl, task_state)

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Count for how long the cube has been resting at the target."""
        xp, cube = array_namespace(qpos), self.centres(qpos)[:, 0]
        near = xp.linalg.vector_norm(cube[:, :2] - task_state["mark_xy"][:, 0], axis=1) <= NEAR
        at_target = count_consecutive(near & (cube[:, 2] <= RESTING), task_state["at_target"])
        lifted = cube[:, 2] >= LIFT_HEIGHT
        return self.result(task_state, at_target >= HOLD_STEPS, [lifted], at_target=at_target)

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Positions of the cubes, the cube to push and the target, metres."""
        xp = array_namespace(qpos)
        return {
            "privileged/cubes": self.flat_cubes(qpos),
            "privileged/target": self.cubes(qpos)[:, 0],
            "privileged/goal": xp.astype(self.mark_positions(task_state)[:, 0], xp.float32),
        }

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: zeros, there is one text."""
        xp = array_namespace(task_state["steps"])
        return xp.zeros_like(task_state["steps"], dtype=xp.int64)


class PushExpert(TabletopExpert):
    """With closed fingers: goes to the side of the cube away from the target, pushes along that line, rises at the end.

    Where the cube slips off the line, the gripper goes behind it again.  The motion of a pushed cube is not predicted,
    so only the first action of a chunk is good.
    """

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        way = situation.goal[:, :2] - situation.cube[:, :2]
        left = np.linalg.norm(way, axis=1)
        ahead = way / np.maximum(left, 1e-6)[:, None]
        from_cube = situation.pinch[:, :2] - situation.cube[:, :2]
        along = (from_cube * ahead).sum(axis=1)
        beside = np.linalg.norm(from_cube - along[:, None] * ahead, axis=1)
        distance = np.linalg.norm(from_cube, axis=1)

        # Go to a point behind the cube: the further from it, the higher; straight up first when beside the cube.
        behind = situation.cube[:, :2] - BEHIND * ahead
        off = np.linalg.norm(situation.pinch[:, :2] - behind, axis=1)
        height = np.clip(LOW + (off - 0.006) * 4.0, LOW, TRAVEL_HEIGHT)
        goal = np.column_stack([behind, height])
        blocked = (situation.pinch[:, 2] < 0.055) & (distance < 0.055) & (off > 0.012)
        goal[blocked, :2], goal[blocked, 2] = situation.target[blocked, :2], TRAVEL_HEIGHT

        # Push: from the line behind the cube, towards a point inside it.
        pushing = (
            (situation.pinch[:, 2] < 0.03) & (along < -0.5 * CONTACT) & (beside < ALIGNED) & (distance < BEHIND + 0.02)
        )
        step = np.minimum(PUSH, 0.5 * left + 0.002)
        ahead_of_cube = situation.cube[:, :2] + (along + step)[:, None] * ahead
        goal[pushing, :2], goal[pushing, 2] = ahead_of_cube[pushing], LOW

        done = left < ARRIVED
        goal[done, :2], goal[done, 2] = situation.target[done, :2], TRAVEL_HEIGHT
        return goal - situation.target, np.ones(len(left), bool)


@declare_mujoco(
    PushTask,
    expert=PushExpert,
    scenes="sims.mujoco.tasks.scenes:push",
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The push environment.

    Options of the task: ``cubes`` and ``marks`` of the model (1), ``deadline`` control steps after which an unfinished
    episode has failed (none).  The rest: see ``make_env``.
    """
    return make_env(PushTask, num_envs, options)
