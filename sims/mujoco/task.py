"""What a task of the MuJoCo environment is, and what its rules need.  One file in ``tasks/`` adds a task.

Rules are functions of the array API standard (data-apis.org), whose functions ``array_namespace(array)`` has for numpy
arrays and torch tensors.  A simulator on a GPU then applies the same rules as one on the processor, without a copy to
the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from array_api_compat import array_namespace, device, to_device

from sims.mujoco.generators import Generators
from vla_rl.contract.env import Array, ArraySpec
from vla_rl.contract.tracker import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT

TaskState = dict[str, Array]


@dataclass(frozen=True)
class Episodes:
    """Initial states of ``R`` episodes, numpy: ``qpos`` [R,nq], ``ctrl`` [R,nu] and ``task_state`` {name: [R,...]}."""

    qpos: np.ndarray
    ctrl: np.ndarray
    task_state: TaskState

    def __setitem__(self, rows: np.ndarray | list[int], others: Episodes) -> None:
        """Put ``others`` into ``rows``."""
        self.qpos[rows], self.ctrl[rows] = others.qpos, others.ctrl
        for name, value in others.task_state.items():
            self.task_state[name][rows] = value


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

    def causes(self, late: Array, diverged: Array) -> Array:
        """int8 [R]: codes of the causes of ends (``vla_rl.contract.tracker``), 0 while an episode runs.

        ``late`` bool [R]: its time is up; ``diverged`` bool [R]: its physics is of no use.
        """
        xp = array_namespace(late)
        found = xp.astype(late, xp.int8) * TIME_LIMIT
        found = xp.where(self.failure >= 0, xp.astype(self.failure, xp.int8) + FAILURES, found)
        found = xp.where(self.success, xp.full_like(found, SUCCESS), found)
        return xp.where(diverged, xp.full_like(found, DIVERGED), found)


class Task:
    """A task over one MuJoCo model.

    All methods work on ``R`` environments at once.  ``sample_episodes``, which alone is random, and ``vary_poses`` do
    so on the host; the arrays of the others are of numpy or of torch: on a GPU they stay there.
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

    def sample_episodes(self, rng: Generators) -> Episodes:
        """Draw a new episode with each of the ``R`` generators; all of it follows from that one."""
        raise NotImplementedError

    def vary_poses(self, episodes: Episodes, values: Mapping[str, np.ndarray]) -> Episodes:
        """``episodes`` with the poses that the parameters ``values`` [R] (``env.py``) say."""
        raise NotImplementedError

    def control(self, ctrl: Array, action: Array) -> Array:
        """The actuator targets [R,nu] after ``action`` [R,D], which is within bounds."""
        raise NotImplementedError

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Apply the rules to ``qpos`` [R,nq] after a control step."""
        raise NotImplementedError

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,S]."""
        raise NotImplementedError

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """{name: [R,...]} as declared in ``extras``."""
        raise NotImplementedError

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: index into ``texts``."""
        raise NotImplementedError

    def colours(self, task_state: TaskState) -> Array:
        """float32 [R,painted,4]: RGBA of the painted geoms."""
        raise NotImplementedError

    def mark_positions(self, task_state: TaskState) -> Array:
        """float64 [R,placed,3]: positions of the placed geoms, metres."""
        raise NotImplementedError


# -- arrays of numpy and of torch --------------------------------------------------------------------------------------


class Constant:
    """A fixed array for use beside numpy arrays and tensors of any device; it is moved to each device once."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.value = np.asarray(value, dtype)
        self._moved: dict[str, Array] = {}

    def beside(self, array: Array) -> Array:
        if isinstance(array, np.ndarray):
            return self.value
        place = str(device(array))
        if place not in self._moved:
            self._moved[place] = to_device(array_namespace(array).asarray(self.value), device(array))
        return self._moved[place]


def count(size: int, array: Array) -> Array:
    """int64 [size]: 0, 1, ... beside ``array``."""
    return array_namespace(array).arange(size, device=device(array))


def pick(array: Array, index: Array) -> Array:
    """[R,...]: the entry ``index[r]`` of every row of ``array`` [R,n,...]; ``index`` is of any integer type."""
    xp = array_namespace(array)
    return array[count(array.shape[0], array), xp.astype(index, xp.int64)]


def first_case(cases: Sequence[tuple[Array, int]]) -> Array:
    """int8 [R]: the number of the first case (bool [R], number) that holds, -1 where none does."""
    xp = array_namespace(cases[0][0])
    found = xp.full(cases[0][0].shape, -1, dtype=xp.int8, device=device(cases[0][0]))
    for condition, number in reversed(cases):
        # Filled there: a number that comes from the host makes it wait for the device.
        found = xp.where(condition, xp.full((), number, dtype=xp.int8, device=device(condition)), found)
    return found


def cases_of(which: Array, values: Sequence[Array]) -> Array:
    """[R,...]: row ``r`` of ``values[which[r]]``, for ``values`` of one shape [R,...] and type."""
    xp = array_namespace(which)
    found = values[0]
    for number, value in enumerate(values[1:], start=1):
        chosen = xp.reshape(which == number, (-1, *(1,) * (value.ndim - 1)))
        found = xp.where(chosen, value, found)
    return found
