"""Initial states of imagined rollouts: recorded moments, first ones of episodes and keyframes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class InitialStates:
    """``N`` recorded moments.

    pictures  uint8 [N,1+context_frames,C,h,w]  the episode's first frame, then the latest ones in order
    state     float32 [N,S]
    task      int64 [N]
    time      int64 [N]                         control steps since its episode began
    """

    pictures: np.ndarray
    state: np.ndarray
    task: np.ndarray
    time: np.ndarray

    def __len__(self) -> int:
        return len(self.task)

    def select(self, index: np.ndarray) -> InitialStates:
        """Those at ``index``."""
        return InitialStates(self.pictures[index], self.state[index], self.task[index], self.time[index])


class Pool(Protocol):
    """Chooses initial states by seed."""

    def draw(self, seeds: np.ndarray, keyframe_share: float) -> InitialStates:
        """An initial state for each of ``seeds`` [R]; ``keyframe_share`` of them keyframes, where there are any."""


@dataclass(frozen=True)
class OrderedPool:
    """Seed ``i`` begins at moment ``i``: for replays of recorded episodes."""

    moments: InitialStates

    def draw(self, seeds: np.ndarray, keyframe_share: float) -> InitialStates:
        """Raises UserError for a seed beyond the last moment."""
        if len(seeds) and seeds.max() >= len(self.moments):
            raise UserError(
                f"there is no initial state {int(seeds.max())} among {len(self.moments)}, so nothing could be replayed "
                "from it; give seeds that count the initial states."
            )
        return self.moments.select(seeds)


@dataclass(frozen=True)
class InitialStatePool:
    """First moments of episodes, and keyframes; the seed chooses the kind and the moment."""

    first: InitialStates
    keyframes: InitialStates

    def __post_init__(self) -> None:
        """Raise UserError when there is no first moment."""
        if not len(self.first):
            raise UserError(
                "no episode's first moment was given, so no rollout could begin; record at least one episode."
            )

    def draw(self, seeds: np.ndarray, keyframe_share: float) -> InitialStates:
        """One for each of ``seeds`` [R]; a keyframe with probability ``keyframe_share``, where there are any."""
        chosen = [self._choose(int(seed), keyframe_share) for seed in seeds]
        parts = [(self.keyframes if late else self.first).select(np.array([i])) for late, i in chosen]
        if not parts:
            return self.first.select(np.zeros(0, int))
        names = ("pictures", "state", "task", "time")
        return InitialStates(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def _choose(self, seed: int, keyframe_share: float) -> tuple[bool, int]:
        chooser = np.random.default_rng([seed, 7])
        late = bool(len(self.keyframes)) and chooser.random() < keyframe_share
        return late, int(chooser.integers(len(self.keyframes if late else self.first)))
