"""A counting environment whose simulator breaks down, as an isolated one shows it: cause "worker", nothing executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sims.toy.counting import CountingEnv
from vla_rl.contract.env import WORKER, Step
from vla_rl.contract.tracker import DIVERGED


class BreakingEnv(CountingEnv):
    """Breaks down before decision ``at`` of the episodes of some seeds, ``deaths`` {seed: how often}."""

    def __init__(self, num_envs: int, deaths: Mapping[int, int], at: int = 1) -> None:
        super().__init__(num_envs)
        self.deaths, self.at = Counter(deaths), at
        self.decisions = np.zeros(num_envs, int)  # of the running episodes
        self.lost = np.zeros(num_envs, bool)
        self.broken: list[int] = []  # seeds, in order

    def _begin(self, env_id: int, seed: int) -> None:
        super()._begin(env_id, seed)
        self.decisions[env_id], self.lost[env_id] = 0, False

    def step(self, chunk: Any, observe: Any = "last") -> Step:
        doomed = (self.decisions == self.at) & ~self._book.done & np.array([self.deaths[s] > 0 for s in self._seed])
        rows = np.flatnonzero(doomed)
        saved = self.snapshot(rows)
        step = super().step(chunk, observe)
        self.decisions += 1
        self.restore(rows, saved)
        self.deaths.subtract(self._seed[rows].tolist())
        self.broken += self._seed[rows].tolist()
        self._book.truncated[rows], self._book.cause[rows] = True, DIVERGED
        for array in (step.valid, step.reward, step.executed):
            array[rows] = 0
        self.lost |= doomed
        cause = tuple(WORKER if lost else cause for lost, cause in zip(self.lost, step.cause, strict=True))
        flags = {name: getattr(self._book, name).copy() for name in ("terminated", "truncated", "success")}
        return replace(step, obs=self._observe(), cause=cause, **flags)
