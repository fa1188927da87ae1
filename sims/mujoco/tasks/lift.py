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
from array_api_compat import array_namespace

from sims.mujoco.arrays import count, first_case, pick
from sims.mujoco.env import MujocoEnv, make_env, make_spec
from sims.mujoco.parameters import parameters
from sims.mujoco.robot import Robot
from sims.mujoco.tabletop import (
    COLOURS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    SPACING,
    Instruct,
    Tabletop,
    check_variant,
    count_consecutive,
    count_steps,
)
from sims.mujoco.task import Episode, TaskResult, TaskState
from vla_rl.contract.env import Array, ArraySpec, EnvSpec, Observation
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
    fewest = (2, 4)  # cubes and colours

    def __init__(
        self,
        cubes: int = 3,
        colours: int = 4,
        instruct: Instruct = "target",
        deadline: int | None = None,
        marks: int = 0,
        robot: Robot | None = None,
    ) -> None:
        """``marks``: flat marks in the scene that lift leaves invisible (other tasks share the model)."""
        check_variant(self.name, cubes, 4, colours, instruct, self.fewest)
        super().__init__(cubes, marks, robot)
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
        qpos = self.place_cubes(self.robot.scatter(self._cubes, SPACING, rng), rng)
        ctrl = self.open_gripper(qpos, rng)
        task_state["colour"][:] = rng.permutation(len(self.texts))[: self._cubes]
        task_state["seeded"][...] = rng.integers(self._cubes)
        other = (task_state["seeded"] + rng.integers(1, max(2, self._cubes))) % self._cubes
        task_state["named"][...] = other if self._instruct == "distractor" else task_state["seeded"]
        return Episode(qpos, ctrl, task_state)

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Count the control steps that every cube was up, and end the episode when one was up for long enough."""
        xp = array_namespace(qpos)
        up = self.centres(qpos)[..., 2] >= LIFT_HEIGHT
        held = count_consecutive(up, task_state["held"])
        long_enough, named = held >= HOLD_STEPS, self._named(task_state)
        success = xp.any(long_enough & named, axis=1)
        wrong = xp.any(long_enough & ~named, axis=1)
        steps, late = count_steps(task_state, self._deadline)
        failure = first_case([(success, -1), (wrong, 0), (late, 1)])
        reward = xp.astype(success, xp.float32)
        return TaskResult(reward, success, failure, {**task_state, "held": held, "steps": steps})

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Cube positions (metres), and which colours were lifted and chosen by the seed."""
        xp, cubes = array_namespace(qpos), self.cubes(qpos)
        # The named cube first: where two are lifted at once, it is the one that counts.
        lasting = (task_state["held"] >= HOLD_STEPS) * (1 + xp.astype(self._named(task_state), xp.int8))
        lifted = xp.astype(pick(task_state["colour"], xp.argmax(lasting, axis=1)), xp.int64)
        return {
            "privileged/cubes": xp.reshape(cubes, (qpos.shape[0], 3 * self._cubes)),
            "privileged/target": pick(cubes, task_state["named"]),
            "privileged/lifted": xp.where(xp.any(lasting > 0, axis=1), lifted, xp.full_like(lifted, -1)),
            "privileged/seeded": self._colour(task_state, "seeded"),
        }

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: the colour that the instruction names."""
        return self._colour(task_state, "named")

    def _named(self, task_state: TaskState) -> Array:
        """bool [R,cubes]: which cube the instruction names."""
        return count(self._cubes, task_state["named"]) == task_state["named"][:, None]

    def _colour(self, task_state: TaskState, which: str) -> Array:
        """int64 [R]: the colour of the cube with the number ``task_state[which]``; 0 before the first reset."""
        xp = array_namespace(task_state["colour"])
        return xp.astype(xp.clip(pick(task_state["colour"], task_state[which]), min=0), xp.int64)


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
    progress="sims.mujoco.tasks.lift_potential:potential",
    parameters=parameters,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The lift environment.

    Options of the task: ``cubes`` 2-4 (3), ``colours`` 4-6 (4), ``instruct`` "target" or "distractor", ``deadline``
    control steps after which an unfinished episode has failed (none).  Those of the environment: see ``make_env``.
    """
    return make_env(LiftTask, _OPTIONS, num_envs, options)
