"""Initial states of imagined rollouts: recorded moments, first ones of episodes and keyframes.

A rollout of a whole task spends most of its steps, and accumulates most of its errors, before success is decided.
Three kinds of moments, found without
labels, show where that is, and keyframes lie before them:

    events      an action entry that jumps: a gripper that opens or closes, the beginning or end of a contact
    slope       the value changes much within a call
    divergence  a failure's last moment whose value still equalled that of successes at the same time

``value`` [M] is any estimate of success, such as a critic's or the outcome head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from vla_rl.contract.errors import UserError

Spans = Sequence[tuple[int, int]]


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
        return InitialStates(self.pictures[index], self.state[index], self.task[index], self.time[index])


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


Pool: TypeAlias = OrderedPool | InitialStatePool
"""Chooses initial states by seed."""


# -- keyframes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyframeConfig:
    """Thresholds of keyframes, and how long before them a rollout begins."""

    jump: float = 0.5  # of an action entry, in units of its whole range
    slope: float = 0.2  # of the value, within ``lead`` control steps
    lead: int = 5  # control steps before the moment itself, so that what decides still lies ahead
    tail: int = 2  # moments at least between a keyframe and its episode's end


def mine(
    action: np.ndarray, reach: np.ndarray, value: np.ndarray, success: np.ndarray, spans: Spans, config: KeyframeConfig
) -> dict[str, np.ndarray]:
    """{kind: int64 [N], sorted, distinct} of episodes with ``action`` [M,D], ranges ``reach`` [D] and ``value`` [M].

    ``success`` [M] is True at the last moment of an episode that succeeded; ``spans`` are first moment and the one
    after the last.  Raises UserError for a value that is not finite.
    """
    if not np.isfinite(value).all():
        raise UserError(
            f"the value of moment {int(np.flatnonzero(~np.isfinite(value))[0])} is not finite, so no keyframe could be "
            "found by it; look for a diverged critic."
        )
    lead = config.lead
    found: dict[str, list[int]] = {"events": [], "slope": [], "divergence": []}
    typical = _median_of_successes(value, success, spans)
    for begin, end in spans:
        jumps = (np.abs(np.diff(action[begin : end - 1], axis=0)) / reach >= config.jump).any(1)
        changes = np.abs(value[begin + lead : end] - value[begin : end - lead]) >= config.slope
        found["events"].extend(_before(np.flatnonzero(jumps) + 1, begin, end, config))
        found["slope"].extend(_before(np.flatnonzero(changes) + lead, begin, end, config))
        if not success[end - 1] and len(typical):
            own = value[begin:end]
            hopeful = np.flatnonzero(own[: len(typical)] >= typical[: end - begin])
            if len(hopeful) and hopeful[-1] < end - begin - 1:
                found["divergence"].extend(_before(hopeful[-1:] + 1, begin, end, config))
    return {kind: np.unique(np.array(part, np.int64)) for kind, part in found.items()}


def _before(offsets: np.ndarray, begin: int, end: int, config: KeyframeConfig) -> list[int]:
    """The moments ``lead`` steps before ``offsets``, without those within ``tail`` steps of the end."""
    moments = begin + np.maximum(offsets - config.lead, 0)
    return moments[moments < end - config.tail].tolist()


def _median_of_successes(value: np.ndarray, success: np.ndarray, spans: Spans) -> np.ndarray:
    """The median value of successful episodes at each control step that at least one of them has."""
    won = [value[begin:end] for begin, end in spans if success[end - 1]]
    longest = max((len(track) for track in won), default=0)
    return np.array([np.median([track[t] for track in won if t < len(track)]) for t in range(longest)])
