"""Simulators of one environment each behind the environment contract, side by side in one process.

``sims/metaworld.py``, ``sims/robosuite.py`` and ``sims/libero.py`` are written on it: each implements ``Simulator``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vla_rl.contract.env import EnvSpec, Observation, Observe, Snapshot, Step
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import DIVERGED, SUCCESS, TIME_LIMIT, EpisodeTracker, restore_rows, select_rows


class Simulator(Protocol):
    """One simulated environment, whose episodes follow from seed and actions alone."""

    def reset(self, seed: int) -> int:
        """Start the episode of ``seed``; returns the index of its instruction in ``spec.tasks``."""

    def act(self, action: np.ndarray) -> tuple[float, bool]:
        """Execute ``action`` float32 [D]: its reward, and whether the task is fulfilled."""

    def state(self) -> np.ndarray:
        """float32 [S]: proprioception."""

    def extras(self) -> Mapping[str, np.ndarray]:
        """The extras of ``spec`` at this moment."""

    def images(self) -> Mapping[str, np.ndarray]:
        """{camera: uint8 [h,w,3]} at this moment; called for observations that are handed out only."""

    def close(self) -> None:
        """Free all resources."""


class SideBySide:
    """``E`` simulators behind the environment contract (``VecEnv`` and ``Snapshots``).

    Success terminates an episode ("success"), ``spec.time_limit`` truncates it ("time_limit"), and so does a state or
    reward that is not finite ("diverged", reward 0; the last finite observation is returned).

    A snapshot is a seed and the actions since the reset: ``restore`` replays them, which takes as long as they took.
    """

    def __init__(self, spec: EnvSpec, simulators: Sequence[Simulator]) -> None:
        """``simulators`` are equal and owned by this object."""
        self.spec, self._simulators = spec, simulators
        count = len(simulators)
        self._book = EpisodeTracker(count)
        self._task = np.zeros(count, np.int64)
        self._state = np.zeros((count, *spec.state.shape), np.float32)
        self._extras = {name: np.zeros((count, *one.shape), one.dtype) for name, one in spec.extras.items()}
        self._images = {name: np.zeros((count, *one.shape), np.uint8) for name, one in spec.images.items()}
        self._stale = np.zeros(count, bool)  # environments that have moved since their pictures were taken
        self._actions = np.zeros((count, spec.time_limit, spec.action_dim), np.float32)

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        self._book.begin(index, seed)
        self._actions[index] = 0
        for env_id in index.tolist():
            self._begin(env_id)
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D]; see ``VecEnv.step``."""
        return self._book.execute(chunk, self.spec, observe, self._execute, self._observe)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Seeds, clocks, ends and the actions since the reset, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(env_ids)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids`` by replaying its actions."""
        index = self._book.index(env_ids)
        restore_rows(self._arrays(), index, snapshot)
        for env_id in index.tolist():
            self._begin(env_id)
            for action in self._actions[env_id, : self._book.time[env_id]]:
                self._advance(env_id, action)
        return self._observe()

    def close(self) -> None:
        """Close every simulator; safe to call twice."""
        for simulator in self._simulators:
            simulator.close()
        self._simulators = ()

    def _begin(self, env_id: int) -> None:
        self._task[env_id] = self._simulators[env_id].reset(int(self._book.seed[env_id]))
        self._read(env_id, self._simulators[env_id].state())

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._actions[env_ids, self._book.time[env_ids] - 1] = action
        reward, success, cause = (np.zeros(env_ids.size, kind) for kind in (np.float32, bool, np.int8))
        for k, env_id in enumerate(env_ids.tolist()):
            reward[k], success[k], cause[k] = self._advance(env_id, action[k])
        return reward, success, cause

    def _advance(self, env_id: int, action: np.ndarray) -> tuple[float, bool, int]:
        """Execute ``action`` [D]: the reward, whether it succeeded, and the code of the cause of its end (0: none)."""
        reward, success = self._simulators[env_id].act(action)
        state = self._simulators[env_id].state()
        if not (np.isfinite(state).all() and math.isfinite(reward)):
            return 0.0, False, DIVERGED
        self._read(env_id, state)
        late = self._book.time[env_id] >= self.spec.time_limit
        return float(reward), bool(success), SUCCESS if success else TIME_LIMIT if late else 0

    def _read(self, env_id: int, state: np.ndarray) -> None:
        self._state[env_id], self._stale[env_id] = state, True
        for name, value in self._simulators[env_id].extras().items():
            self._extras[name][env_id] = value

    def _observe(self) -> Observation:
        for env_id in np.flatnonzero(self._stale).tolist() if self._images else ():
            for name, image in self._simulators[env_id].images().items():
                self._images[name][env_id] = image
        self._stale[:] = False
        images, extras = ({name: value.copy() for name, value in part.items()} for part in (self._images, self._extras))
        return Observation(images, self._state.copy(), self._task.copy(), self._book.time.copy(), extras)

    def _arrays(self) -> dict[str, np.ndarray]:
        return self._book.arrays() | {"actions": self._actions}


def require_positive(**given: int) -> None:
    """Raise UserError for an option that is not at least 1."""
    for name, value in given.items():
        if value < 1:
            raise UserError(f"{name}={value} is less than 1, so no episode can be played; give at least 1.")


class TaskPool:
    """Environments of many tasks, made when they are first needed; the idle ones are bounded in number.

    A simulator whose scene is written into its model needs one of its own for every environment and task.
    """

    def __init__(self, make: Callable[[str], Any], most_idle: int) -> None:
        """``make(task)`` makes an environment, which has a ``close``."""
        self._make, self._most_idle = make, most_idle
        self._idle: OrderedDict[int, tuple[str, Any]] = OrderedDict()  # longest idle first

    def take(self, task: str) -> Any:
        """An environment of ``task``, which belongs to the caller."""
        for key, (other, env) in reversed(self._idle.items()):
            if other == task:
                del self._idle[key]
                return env
        return self._make(task)

    def give_back(self, task: str, env: Any) -> None:
        """The caller needs ``env`` no more."""
        self._idle[id(env)] = (task, env)
        if len(self._idle) > self._most_idle:
            _, (_, oldest) = self._idle.popitem(last=False)
            oldest.close()

    def close(self) -> None:
        """Close all that are idle; safe to call twice."""
        while self._idle:
            self._idle.popitem()[1][1].close()
