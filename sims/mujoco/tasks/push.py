"""Push: "push the cube to the target", a dark round mark on the table.

Success: for 5 control steps in a row, within 80, the cube rests on the table with its centre within 2.5 cm of the
target's.  Failure: the cube was lifted 6 cm ("lifted"); with ``deadline`` also an episode that takes longer
("too_late", as in lift).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.arrays import first_case
from sims.mujoco.env import MujocoEnv, make_env, make_spec
from sims.mujoco.parameters import parameters
from sims.mujoco.tabletop import (
    COLOURS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    TARGET_COLOUR,
    Tabletop,
    count_consecutive,
    count_steps,
)
from sims.mujoco.task import Episode, TaskResult, TaskState
from sims.mujoco.tasks.place import NEAR, RESTING
from vla_rl.contract.env import Array, EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task

WITHIN = 0.09  # metres; the cube and the target are within +-WITHIN, so that the gripper can get behind the cube
DISTANCE = (0.07, 0.13)  # metres between them


class PushTask(Tabletop):
    """The rules of push; see the module's docstring and ``sims.mujoco.task.Task``."""

    name = "push"
    failures: tuple[str, ...] = ("lifted", "too_late")
    time_limit = 80

    def __init__(self, cubes: int = 1, marks: int = 1, deadline: int | None = None) -> None:
        """``cubes`` and ``marks`` of the model, of which one each is on the table."""
        if cubes < 1 or marks < 1:
            raise UserError(
                f"push with {cubes} cubes and {marks} marks has nothing to push; give at least one of each."
            )
        super().__init__(cubes, marks)
        self.texts: tuple[str, ...] = ("push the cube to the target",)
        self.families: tuple[str, ...] = (self.name,)
        self.task_state: TaskState = {
            **self.scene_state(),
            "steps": np.zeros((), np.int16),
            "at_target": np.zeros((), np.int16),  # control steps in a row that the cube was at the target
        }
        self._deadline = deadline
        self.extras = {
            "privileged/cubes": replace(self.place, shape=(cubes * 3,), names=()),
            "privileged/target": self.place,
            "privileged/goal": self.place,
        }

    def sample_episode(self, rng: np.random.Generator) -> Episode:
        """A cube of any colour and the target at a distance; the open gripper above."""
        task_state = {name: np.copy(value) for name, value in self.task_state.items()}
        while True:
            cube, target = rng.uniform(-WITHIN, WITHIN, (2, 2))
            if DISTANCE[0] <= np.linalg.norm(cube - target) <= DISTANCE[1]:
                break
        qpos = self.place_cubes(cube[None], rng)
        ctrl = self.open_gripper(qpos, rng)
        task_state["colour"][0] = rng.integers(len(COLOURS))
        task_state["mark_colour"][0], task_state["mark_xy"][0] = TARGET_COLOUR, target
        return Episode(qpos, ctrl, task_state)

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Count for how long the cube has been resting at the target."""
        xp, cube = array_namespace(qpos), self.centres(qpos)[:, 0]
        near = xp.linalg.vector_norm(cube[:, :2] - task_state["mark_xy"][:, 0], axis=1) <= NEAR
        at_target = count_consecutive(near & (cube[:, 2] <= RESTING), task_state["at_target"])
        success = at_target >= HOLD_STEPS
        steps, late = count_steps(task_state, self._deadline)
        failure = first_case([(success, -1), (cube[:, 2] >= LIFT_HEIGHT, 0), (late, 1)])
        after = {**task_state, "at_target": at_target, "steps": steps}
        return TaskResult(xp.astype(success, xp.float32), success, failure, after)

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Positions of the cubes, the cube to push and the target, metres."""
        xp, cubes = array_namespace(qpos), self.cubes(qpos)
        return {
            "privileged/cubes": xp.reshape(cubes, (qpos.shape[0], 3 * self._cubes)),
            "privileged/target": cubes[:, 0],
            "privileged/goal": xp.astype(self.mark_positions(task_state)[:, 0], xp.float32),
        }

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: zeros, there is one text."""
        xp = array_namespace(task_state["steps"])
        return xp.zeros_like(task_state["steps"], dtype=xp.int64)


_OPTIONS = ("cubes", "marks", "deadline")


def spec(**options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options."""
    return make_spec(PushTask, _OPTIONS, options)


@declare_task(
    expert="sims.mujoco.tasks.push_expert:PushExpert",
    scenes="sims.mujoco.tasks.scenes:push",
    spec=spec,
    parameters=parameters,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The push environment.

    Options of the task: ``cubes`` and ``marks`` of the model (1), ``deadline`` control steps after which an unfinished
    episode has failed (none).  The rest: see ``make_env``.
    """
    return make_env(PushTask, _OPTIONS, num_envs, options)
