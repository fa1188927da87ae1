"""From scores to a decision: the threshold that keeps a promise on labelled data; how good scores and decisions are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Counts:
    """How often, of ``of`` times, "done" was said, was so, and both."""

    said_and_so: int
    said: int
    so: int
    of: int

    @classmethod
    def of_decisions(cls, said: np.ndarray, so: np.ndarray) -> Counts:
        """From what was said and what was so, both bool [N]."""
        return cls(int((said & so).sum()), int(said.sum()), int(so.sum()), said.size)


def choose_threshold(score: np.ndarray, label: np.ndarray, precision: float) -> float:
    """The lowest threshold for which at least ``precision`` of the frames at or above it are successes.

    ``score`` float [N], ``label`` bool [N].  It lies half-way between the last score that counts and the first that
    does not (half a unit below the last one, if all count), and equal scores are never parted.  What a reward model
    says wrongly, RL exploits; what it misses, costs time only.  So precision is what is promised, and the threshold is
    as low as that allows.
    Raises UserError when no threshold keeps the promise.
    """
    order = np.argsort(-score, kind="stable")
    sorted_score, so = score[order].astype(np.float64), np.cumsum(label[order])
    share = so / np.arange(1, len(score) + 1)
    last_of_equals = np.append(sorted_score[1:] < sorted_score[:-1], True)
    good = np.flatnonzero(last_of_equals & (share >= precision) & (so > 0))
    if not good.size:
        best = share[last_of_equals].max(initial=0.0)
        raise UserError(
            f"no threshold makes {precision:.0%} of what is called a success one (at best {best:.0%} of "
            f"{len(score)} labelled frames), so this classifier would reward failures; train it longer, label more "
            "frames, or ask for less precision."
        )
    k = int(good[-1])
    below = sorted_score[k + 1] if k + 1 < len(score) else sorted_score[k] - 1.0
    return float((sorted_score[k] + below) / 2)


def value_order_correlation(value: np.ndarray) -> float:
    """Spearman's rank correlation of ``value`` [T] with time, -1 to 1; equal values share their mean rank.

    VOC of GVL (Ma et al. 2024, arXiv 2411.04549): 1 when progress never falls, 0 for one that stays where it is.
    """
    below = (value[:, None] > value).sum(1) + 0.5 * (value[:, None] == value).sum(1)
    rank, time = below - below.mean(), np.arange(len(value)) - (len(value) - 1) / 2
    size = float(np.sqrt((rank**2).sum() * (time**2).sum()))
    return float(rank @ time) / size if size else 0.0
