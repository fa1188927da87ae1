"""Keyframes: moments of recorded episodes from which imagined rollouts begin, found without labels.

A rollout of a whole task spends most of its steps, and accumulates most of its errors, before success is decided.
Three kinds of moments show where that is:

    events      an action entry that jumps: a gripper that opens or closes, the beginning or end of a contact
    slope       the value changes much within a call
    divergence  a failure's last moment whose value still equalled that of successes at the same time

``value`` [M] is any estimate of success, such as a critic's or the outcome head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import UserError

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class KeyframeConfig:
    """Thresholds of keyframes, and how long before them a rollout begins."""

    jump: float = 0.5  # of an action entry, in units of its whole range
    slope: float = 0.2  # of the value, within ``lead`` control steps
    lead: int = 5  # control steps before the moment itself, so that what decides still lies ahead
    tail: int = 2  # moments at least between a keyframe and its episode's end


@dataclass(frozen=True)
class Keyframes:
    """Moments [N], sorted and distinct, by kind."""

    events: np.ndarray
    slope: np.ndarray
    divergence: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """int64 [N]: every one once."""
        return np.unique(np.concatenate([self.events, self.slope, self.divergence]))


def mine(
    action: np.ndarray, reach: np.ndarray, value: np.ndarray, success: np.ndarray, spans: Spans, config: KeyframeConfig
) -> Keyframes:
    """Keyframes of episodes with ``action`` [M,D], whose ranges are ``reach`` [D], and ``value`` [M].

    ``success`` [M] is True at the last moment of an episode that succeeded; ``spans`` are first moment and the one
    after the last.  Raises UserError for a value that is not finite.
    """
    if not np.isfinite(value).all():
        raise UserError(
            f"the value of moment {int(np.flatnonzero(~np.isfinite(value))[0])} is not finite, so no keyframe could be "
            "found by it; look for a diverged critic."
        )
    lead = config.lead
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    typical = _median_of_successes(value, success, spans)
    for begin, end in spans:
        jumps = (np.abs(np.diff(action[begin : end - 1], axis=0)) / reach >= config.jump).any(1)
        changes = np.abs(value[begin + lead : end] - value[begin : end - lead]) >= config.slope
        found[0].extend(_before(np.flatnonzero(jumps) + 1, begin, end, config))
        found[1].extend(_before(np.flatnonzero(changes) + lead, begin, end, config))
        if not success[end - 1] and len(typical):
            own = value[begin:end]
            hopeful = np.flatnonzero(own[: len(typical)] >= typical[: end - begin])
            if len(hopeful) and hopeful[-1] < end - begin - 1:
                found[2].extend(_before(hopeful[-1:] + 1, begin, end, config))
    return Keyframes(*(np.unique(np.array(part, np.int64)) for part in found))


def _before(offsets: np.ndarray, begin: int, end: int, config: KeyframeConfig) -> list[int]:
    """The moments ``lead`` steps before ``offsets``, without those within ``tail`` steps of the end."""
    moments = begin + np.maximum(offsets - config.lead, 0)
    kept: list[int] = moments[moments < end - config.tail].tolist()
    return kept


def _median_of_successes(value: np.ndarray, success: np.ndarray, spans: Spans) -> np.ndarray:
    """The median value of successful episodes at each control step that at least one of them has."""
    won = [value[begin:end] for begin, end in spans if success[end - 1]]
    longest = max((len(track) for track in won), default=0)
    return np.array([np.median([track[t] for track in won if t < len(track)]) for t in range(longest)])
