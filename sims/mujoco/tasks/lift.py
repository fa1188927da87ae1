"""Lift: "pick up the red cube" among cubes of other colours.

Success: the named cube's centre at least 6 cm above the table at the end of 5 control steps in a row, within 60.
Failure: the same held for any other cube, which ends the episode with the cause "wrong_object"; if both happen at the
same step, the named cube counts.  A resting cube's centre is 1.8 cm above the table.

With ``deadline`` an episode that takes longer has failed, with the cause "too_late": a stricter task that spends less
time on hopeless situations in training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sims.mujoco.env import MujocoEnv, make_env, make_spec
from sims.mujoco.parameters import parameters
from sims.mujoco.tabletop import (
    COLOURS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    SPACING,
    Instruct,
    Tabletop,
    check_variant,
    count_consecutive,
    scatter,
)
from sims.mujoco.task import Episode, TaskResult, TaskState
from vla_rl.contract.env import Observation
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.contract.task import declare_task


class LiftTask(Tabletop):
    """The rules of lift; see the module's docstring and ``sims.mujoco.task.Task``.

    An episode's seed decides the scene and which cube is the target.  With ``instruct="distractor"`` the same seed
    gives the same scene, but the instruction names another cube of it, which then has to be lifted; lifting the former
    target is "wrong_object".  ``privileged/lifted`` is the colour that was lifted, ``privileged/seeded`` the one that
    the seed chose.
    """

    name = "lift"
    failures: tuple[str, ...] = ("wrong_object", "too_late")
    time_limit = 60

    def __init__(
        self,
        cubes: int = 3,
        colours: int = 4,
        instruct: Instruct = "target",
        deadline: int | None = None,
        marks: int = 0,
    ) -> None:
        """``marks``: flat marks in the scene that lift leaves invisible (other tasks share the model)."""
        check_variant(self.name, cubes, 4, colours, instruct)
        super().__init__(cubes, marks)
        self.texts = tuple(f"pick up the {name} cube" for name in list(COLOURS)[:colours])
        self.families = (self.name,) * len(self.texts)
        self.task_state: TaskState = {
            **self.scene_state(),
            "seeded": np.array(0, np.int8),  # cube chosen by the seed
            "named": np.array(0, np.int8),  # cube named by the instruction
            "steps": np.zeros((), np.int16),  # control steps since the start
            "held": np.zeros(cubes, np.int16),  # control steps in a row that each cube was up
        }
        self._instruct, self._deadline = instruct, deadline
        self.extras = {
            "privileged/cubes": replace(self.place, shape=(cubes * 3,), names=()),
            "privileged/target": self.place,
            "privileged/lifted": ArraySpec((), "int64", -1, colours - 1, unit="index of a colour, -1 for none"),
            "privileged/seeded": ArraySpec((), "int64", 0, colours - 1, unit="index of a colour"),
        }

    def sample_episode(self, rng: np.random.Generator) -> Episode:
        """A scene: cubes apart from each other, colours all different, the open gripper above the table."""
        task_state = {name: np.copy(value) for name, value in self.task_state.items()}
        qpos = self.place_cubes(scatter(self._cubes, SPACING, rng), rng)
        ctrl = self.open_gripper(qpos, rng)
        task_state["colour"][:] = rng.permutation(len(self.texts))[: self._cubes]
        task_state["seeded"][...] = rng.integers(self._cubes)
        other = (task_state["seeded"] + rng.integers(1, self._cubes)) % self._cubes
        task_state["named"][...] = other if self._instruct == "distractor" else task_state["seeded"]
        return Episode(qpos, ctrl, task_state)

    def evaluate(self, qpos: np.ndarray, task_state: TaskState) -> TaskResult:
        """Count the control steps that every cube was up, and end the episode when one was up for long enough."""
        up = qpos[:, self._cube_xyz[:, 2]] >= LIFT_HEIGHT
        held = count_consecutive(up, task_state["held"])
        long_enough = held >= HOLD_STEPS
        named = np.arange(self._cubes) == task_state["named"][:, None]
        success = (long_enough & named).any(axis=1)
        wrong = (long_enough & ~named).any(axis=1) & ~success
        steps = (task_state["steps"] + 1).astype(np.int16)
        late = (steps >= self._deadline) & ~success if self._deadline else np.zeros_like(success)
        failure = np.where(wrong, np.int8(0), np.where(late, np.int8(1), np.int8(-1)))
        return TaskResult(success.astype(np.float32), success, failure, {**task_state, "held": held, "steps": steps})

    def observe_extras(self, qpos: np.ndarray, task_state: TaskState) -> dict[str, np.ndarray]:
        """Cube positions (metres), and which colours were lifted and chosen by the seed."""
        cubes, index = self.cubes(qpos), np.arange(len(qpos))
        # The named cube first: where two are lifted at once, it is the one that counts.
        lasting = (task_state["held"] >= HOLD_STEPS) * (1 + (np.arange(self._cubes) == task_state["named"][:, None]))
        lifted = task_state["colour"][index, lasting.argmax(axis=1)].astype(np.int64)
        return {
            "privileged/cubes": cubes.reshape(len(qpos), 3 * self._cubes),
            "privileged/target": cubes[index, task_state["named"]],
            "privileged/lifted": np.where(lasting.any(axis=1), lifted, -1),
            "privileged/seeded": np.maximum(task_state["colour"][index, task_state["seeded"]], 0).astype(np.int64),
        }

    def instruction(self, task_state: TaskState) -> np.ndarray:
        """int64 [R]: the colour that the instruction names."""
        colour: np.ndarray = task_state["colour"][np.arange(len(task_state["named"])), task_state["named"]]
        return np.maximum(colour, 0).astype(np.int64)


_OPTIONS = ("cubes", "colours", "instruct", "deadline")


def spec(**options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options."""
    return make_spec(LiftTask, _OPTIONS, options)


def claims(obs: Observation) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two claims: the named cube is lifted or not; the cube that the seed had chosen is not lifted.

    For ``instruct="distractor"``, where these are two cubes of one scene: a classifier that gets the same picture with
    both instructions must use the instruction.  The second label is unknown while another cube is lifted.
    """
    up = obs.extras["privileged/cubes"].reshape(len(obs.task), -1, 3)[..., 2] >= LIFT_HEIGHT
    named, other = obs.extras["privileged/target"][:, 2] >= LIFT_HEIGHT, obs.extras["privileged/seeded"]
    known = (up.sum(1) == named) & (other != obs.task)
    return [(obs.task, named, np.ones_like(named)), (other, np.zeros_like(named), known)]


@declare_task(
    expert="sims.mujoco.tasks.lift_expert:LiftExpert",
    scenes="sims.mujoco.tasks.lift_scenes:random_scenes",
    swapped_options={"instruct": "distractor"},
    spec=spec,
    claims=claims,
    parameters=parameters,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The lift environment.

    Options of the task: ``cubes`` 2-4 (3), ``colours`` 4-6 (4), ``instruct`` "target" or "distractor", ``deadline``
    control steps after which an unfinished episode has failed (none).  Those of the environment: see ``make_env``.
    """
    return make_env(LiftTask, _OPTIONS, num_envs, options)
