"""A base class for environments written in numpy: it handles resets, chunks, ends, snapshots and validation.

A subclass implements ``_begin``, ``_advance`` and ``_state``; ``sims/toy/point_mass.py`` is a complete example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.contract.env import EnvSpec, Observation, Observe, Snapshot, Step
from vla_rl.contract.tracker import SUCCESS, TIME_LIMIT, EpisodeTracker, one_each, restore_rows, select_rows


class NumpyEnv:
    """``E`` environments in numpy (``VecEnv`` and ``Snapshots``); subclasses implement the task."""

    def __init__(self, spec: EnvSpec, num_envs: int, task_state: dict[str, np.ndarray]) -> None:
        """``task_state`` {name: [E,...]}: the arrays that the subclass changes; snapshots hold them."""
        self.spec = spec
        self._book = EpisodeTracker(num_envs)
        self._task_state = task_state
        self._time, self._seed = self._book.time, self._book.seed

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        self._book.begin(index, seed)
        for env_id, value in zip(index, seed, strict=True):
            self._begin(int(env_id), int(value))
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D]; see ``VecEnv.step``."""
        return self._book.execute(chunk, self.spec, observe, self._execute, self._observe)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on; see ``Snapshots``."""
        index = self._book.index(env_ids)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``."""
        restore_rows(self._arrays(), self._book.index(env_ids), snapshot)
        return self._observe()

    def close(self) -> None:
        """Nothing to free."""

    def _begin(self, env_id: int, seed: int) -> None:
        """Draw the initial state of environment ``env_id`` from ``seed``."""
        raise NotImplementedError

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Execute ``action`` [R,D], which ``_time`` counts already: reward [R], success [R], time limit reached [R]."""
        raise NotImplementedError

    def _state(self) -> np.ndarray:
        """float32 [E,S]: proprioception."""
        raise NotImplementedError

    def _images(self) -> Mapping[str, np.ndarray]:
        return {}

    def _instruction(self) -> np.ndarray:
        return np.zeros(self.num_envs, np.int64)

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward, success, late = one_each(self._advance(env_ids, action), len(env_ids))
        return reward, success, np.select([success, late], [SUCCESS, TIME_LIMIT], 0)

    def _arrays(self) -> dict[str, np.ndarray]:
        return self._book.arrays() | {f"task_state/{name}": value for name, value in self._task_state.items()}

    def _observe(self) -> Observation:
        return Observation(self._images(), self._state(), self._instruction(), self._time.copy())
