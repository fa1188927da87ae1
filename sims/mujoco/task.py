"""The task protocol of the MuJoCo environment.  One file in ``tasks/`` that implements it adds a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mujoco
import numpy as np

from vla_rl.contract.env import Array, ArraySpec

TaskState = dict[str, Array]


@dataclass(frozen=True)
class Episode:
    """The initial state of one episode, in numpy: ``qpos`` [nq], ``ctrl`` [nu] and ``task_state`` {name: [...]}."""

    qpos: np.ndarray
    ctrl: np.ndarray
    task_state: TaskState


@dataclass(frozen=True)
class TaskResult:
    """The rules applied to ``R`` environments after one control step.

    reward   float32 [R]
    success  bool [R]     the task is done
    failure  int8 [R]     index into ``Task.failures``, -1 where nothing failed
    task_state   after this step
    """

    reward: Array
    success: Array
    failure: Array
    task_state: TaskState


class Task(Protocol):
    """A task over one MuJoCo model.

    Only ``sample_episode`` is random; it and ``vary_poses`` work on one environment, on the host.  The other methods
    work on ``R`` environments at once, whose arrays are of numpy or of torch (``arrays.py``): on a GPU they stay there.
    """

    name: str
    model: mujoco.MjModel
    texts: tuple[str, ...]  # becomes spec.tasks
    families: tuple[str, ...]  # the kind of task of each text, for tables of success
    failures: tuple[str, ...]  # causes that end an episode without success
    time_limit: int  # control steps
    substeps: int  # physics steps per control step
    state: ArraySpec
    action: ArraySpec
    extras: dict[str, ArraySpec]
    painted: tuple[int, ...]  # ids of geoms with a colour per environment
    placed: tuple[int, ...]  # ids of fixed geoms with a position per environment
    movable: tuple[int, ...]  # ids of the bodies that are the task's objects
    surfaces: tuple[int, ...]  # ids of the geoms of the table
    task_state: TaskState  # an example for one environment, for shapes and dtypes

    def sample_episode(self, rng: np.random.Generator) -> Episode:
        """Draw a new episode; all of it follows from ``rng``."""

    def vary_poses(self, episode: Episode, values: Mapping[str, float]) -> Episode:
        """``episode`` with the poses that the parameters ``values`` (``parameters.py``) say."""

    def control(self, ctrl: Array, action: Array) -> Array:
        """The actuator targets [R,nu] after ``action`` [R,D], which is within bounds."""

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Apply the rules to ``qpos`` [R,nq] after a control step."""

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,S]."""

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """{name: [R,...]} as declared in ``extras``."""

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: index into ``texts``."""

    def colours(self, task_state: TaskState) -> Array:
        """float32 [R,painted,4]: RGBA of the painted geoms."""

    def mark_positions(self, task_state: TaskState) -> Array:
        """float64 [R,placed,3]: positions of the placed geoms, metres."""
