"""Where dreams begin: recorded moments, an episode's first ones and keyframes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Start:
    """``N`` moments.

    pictures  uint8 [N,1+memory,C,h,w]  the episode's first, then the latest ones in order
    state     float32 [N,S]
    task      int64 [N]
    """

    pictures: np.ndarray
    state: np.ndarray
    task: np.ndarray

    def __len__(self) -> int:
        return len(self.task)

    def select(self, index: np.ndarray) -> Start:
        """Those at ``index``."""
        return Start(self.pictures[index], self.state[index], self.task[index])


class Pool(Protocol):
    """Whoever chooses where dreams begin."""

    def draw(self, seeds: np.ndarray, share: float) -> Start:
        """A start for each of ``seeds`` [R]; ``share`` of them keyframes, as far as there are any."""


@dataclass(frozen=True)
class InOrder:
    """Seed ``i`` begins at start ``i``: for replays of what is recorded."""

    starts: Start

    def draw(self, seeds: np.ndarray, share: float) -> Start:
        """Raises UserError for a seed beyond the last start."""
        if len(seeds) and seeds.max() >= len(self.starts):
            raise UserError(
                f"there is no start {int(seeds.max())} among {len(self.starts)}, so nothing could be replayed from it; "
                "give seeds that count the starts."
            )
        return self.starts.select(seeds)


@dataclass(frozen=True)
class Starts:
    """Both kinds; a share says how often it is which, and a seed which one it is."""

    first: Start
    keyframes: Start

    def __post_init__(self) -> None:
        """Raise UserError when there is nowhere to begin."""
        if not len(self.first):
            raise UserError(
                "no episode's first moment was given, so no dream could begin; record at least one episode."
            )

    def draw(self, seeds: np.ndarray, share: float) -> Start:
        """One for each of ``seeds`` [R]; ``share`` of them, by chance, are keyframes where there are any."""
        chosen = [self._choose(int(seed), share) for seed in seeds]
        parts = [(self.keyframes if late else self.first).select(np.array([i])) for late, i in chosen]
        if not parts:
            return self.first.select(np.zeros(0, int))
        return Start(*(np.concatenate([getattr(part, n) for part in parts]) for n in ("pictures", "state", "task")))

    def _choose(self, seed: int, share: float) -> tuple[bool, int]:
        chooser = np.random.default_rng([seed, 7])
        late = bool(len(self.keyframes)) and chooser.random() < share
        return late, int(chooser.integers(len(self.keyframes if late else self.first)))
