"""Mixed: lift, place and push on one table; an episode's seed decides which.

The rules, instructions and time limits are those of the three tasks.  One that takes longer than its own limit has
failed with the cause "too_late"; ``deadlines`` {task: control steps} makes the limits stricter in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, declare_mujoco, make_env
from sims.mujoco.generators import Generators
from sims.mujoco.tabletop import Tabletop
from sims.mujoco.task import Constant, Episodes, TaskResult, TaskState, cases_of
from sims.mujoco.tasks.lift import LiftExpert, LiftTask, potential
from sims.mujoco.tasks.place import PLATES, PlaceExpert, PlaceTask
from sims.mujoco.tasks.push import PushExpert, PushTask
from vla_rl.contract.env import Array, Observation, on_host
from vla_rl.contract.errors import UserError, did_you_mean

_REACH, _NEAR = 0.4, 0.1  # of progress: share of reaching in the whole; metres at which something is nearly done
CUBES = 3
_SHARED = ("colour", "mark_colour", "mark_xy")  # the task_state that all three share


class MixedTask(Tabletop):
    """Three tasks in one model.  The task state holds that of each task, prefixed, and ``which`` one is active."""

    name = "mixed"

    def __init__(self, deadlines: Mapping[str, int] | None = None) -> None:
        super().__init__(CUBES, PLATES)
        limits = {"lift": LiftTask.time_limit, "place": PlaceTask.time_limit, "push": PushTask.time_limit}
        for name in deadlines or {}:
            if name not in limits:
                raise UserError(
                    f"no task of mixed is called {name!r}, so it has no deadline; {did_you_mean(name, limits)}"
                )
        self.time_limit = max(limits.values())
        limits |= deadlines or {}
        self.tasks: tuple[LiftTask | PlaceTask | PushTask, ...] = (
            LiftTask(CUBES, deadline=limits["lift"], marks=PLATES),
            PlaceTask(CUBES, deadline=limits["place"]),
            PushTask(CUBES, PLATES, deadline=limits["push"]),
        )
        self.texts = tuple(text for task in self.tasks for text in task.texts)
        self.families = tuple(task.name for task in self.tasks for _ in task.texts)
        self.failures = tuple(dict.fromkeys(cause for task in self.tasks for cause in task.failures))
        self.task_state: TaskState = {"which": np.zeros((), np.int8), **self.scene_state()}
        for task in self.tasks:
            self.task_state |= {f"{task.name}/{name}": v for name, v in task.task_state.items() if name not in _SHARED}
        causes = [[*(self.failures.index(cause) for cause in task.failures), -1] for task in self.tasks]
        self._causes = [Constant(numbers, np.int8) for numbers in causes]  # of each task's failures and of none
        self._first_text = {task.name: self.families.index(task.name) for task in self.tasks}
        self.extras = self.place_extras("target", "goal")

    def sample_episodes(self, rng: Generators) -> Episodes:
        """Draw tasks, then an episode of each."""
        drawn, which = self.blank_episodes(len(rng)), rng.integers(0, len(self.tasks))
        drawn.task_state["which"][:] = which
        for number, task in enumerate(self.tasks):
            if (rows := np.flatnonzero(which == number)).size:
                episodes = task.sample_episodes(rng[rows])
                drawn[rows] = replace(episodes, task_state=_prefixed(task, episodes.task_state))
        return drawn

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        xp, which = array_namespace(qpos), task_state["which"]
        results = [task.evaluate(qpos, _own(task, task_state)) for task in self.tasks]
        causes = zip(self._causes, results, strict=True)
        failure = [cause.beside(qpos)[xp.astype(result.failure, xp.int64)] for cause, result in causes]
        after = dict(task_state)  # the tasks leave the entries that they share as they are
        for number, (task, result) in enumerate(zip(self.tasks, results, strict=True)):
            for name, value in _prefixed(task, result.task_state).items():
                if name not in _SHARED:
                    after[name] = cases_of(which == number, (task_state[name], value))
        reward, success = ([getattr(result, name) for result in results] for name in ("reward", "success"))
        return TaskResult(cases_of(which, reward), cases_of(which, success), cases_of(which, failure), after)

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Positions of the cubes, of the named cube and of its goal (in lift: the cube itself), metres."""
        found = [task.observe_extras(qpos, _own(task, task_state)) for task in self.tasks]
        for extras in found:
            extras.setdefault("privileged/goal", extras["privileged/target"])
        return {name: cases_of(task_state["which"], [extras[name] for extras in found]) for name in self.extras}

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: index into the concatenated texts of all tasks."""
        texts = [self._first_text[task.name] + task.instruction(_own(task, task_state)) for task in self.tasks]
        return cases_of(task_state["which"], texts)


def _own(task: Any, task_state: TaskState) -> TaskState:
    """The entries of ``task_state`` that belong to ``task``, under their own names."""
    return {name: task_state[name if name in _SHARED else f"{task.name}/{name}"] for name in task.task_state}


def _prefixed(task: Any, task_state: TaskState) -> TaskState:
    return {name if name in _SHARED else f"{task.name}/{name}": value for name, value in task_state.items()}


class MixedExpert:
    """The expert of each environment's task, by the environment's ``families``."""

    def __init__(self, horizon: int = 5) -> None:
        experts: tuple[Callable[..., Any], ...] = (LiftExpert, PlaceExpert, PushExpert)
        self._experts = tuple(expert(horizon) for expert in experts)

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,4]."""
        actions = np.stack([expert.act(obs) for expert in self._experts])
        task = on_host(obs.task)
        return actions[_tasks()[task], np.arange(len(task))]


def progress(obs: Observation) -> np.ndarray:
    """float64 [E] from 0 to 1: in lift its ``potential``; else for the gripper at the cube and the cube at its goal."""
    cube, goal = (np.asarray(obs.extras[f"privileged/{name}"], np.float64) for name in ("target", "goal"))
    reached = 1 - np.tanh(np.linalg.norm(obs.state[:, :3] - cube, axis=1) / _NEAR)
    brought = 1 - np.tanh(np.linalg.norm(goal[:, :2] - cube[:, :2], axis=1) / _NEAR)
    lifts = _tasks()[on_host(obs.task)] == 0
    return np.where(lifts, potential(obs), _REACH * reached + (1 - _REACH) * brought)


@cache
def _tasks() -> np.ndarray:
    """int: which of lift, place and push each instruction belongs to."""
    names = [task.name for task in (LiftTask, PlaceTask, PushTask)]
    return np.array([names.index(family) for family in MixedTask().families])


@declare_mujoco(
    MixedTask,
    expert=MixedExpert,
    scenes="sims.mujoco.tasks.scenes:mixed",
    progress=progress,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The environment of all three tasks.

    Option of the task: ``deadlines`` {"lift": 25, ...}.  The rest: see ``make_env``.
    """
    return make_env(MixedTask, num_envs, options)
