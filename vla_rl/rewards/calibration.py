"""From scores to decisions: a threshold of given precision on labelled data, and metrics of scores and decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Counts:
    """Counts over ``total`` decisions: predicted positive, actually positive, and both (true positives)."""

    true_positives: int
    predicted: int
    actual: int
    total: int

    @classmethod
    def from_decisions(cls, predicted: np.ndarray, actual: np.ndarray) -> Counts:
        """From predictions and labels, both bool [N]."""
        return cls(int((predicted & actual).sum()), int(predicted.sum()), int(actual.sum()), predicted.size)


def choose_threshold(score: np.ndarray, label: np.ndarray, precision: float) -> float:
    """The lowest threshold with at least ``precision`` among the frames at or above it.

    ``score`` float [N], ``label`` bool [N].  The threshold lies half-way between the lowest score at or above it and
    the next lower one (half a unit below the lowest, if all are above); equal scores are never separated.  Precision is
    what counts, because RL exploits false positives, while false negatives only cost time.
    Raises UserError when no threshold has this precision.
    """
    order = np.argsort(-score, kind="stable")
    sorted_score, positives = score[order].astype(np.float64), np.cumsum(label[order])
    achieved = positives / np.arange(1, len(score) + 1)
    last_of_ties = np.append(sorted_score[1:] < sorted_score[:-1], True)
    good = np.flatnonzero(last_of_ties & (achieved >= precision) & (positives > 0))
    if not good.size:
        best = achieved[last_of_ties].max(initial=0.0)
        raise UserError(
            f"no threshold has a precision of {precision:.0%} (at best {best:.0%} on {len(score)} labelled frames), so "
            "this classifier would reward failures; train it longer, label more frames, or lower the precision."
        )
    k = int(good[-1])
    below = sorted_score[k + 1] if k + 1 < len(score) else sorted_score[k] - 1.0
    return float((sorted_score[k] + below) / 2)


def value_order_correlation(value: np.ndarray) -> float:
    """Spearman's rank correlation of ``value`` [T] with time, -1 to 1; ties share their mean rank.

    VOC of GVL (Ma et al. 2024, arXiv 2411.04549): 1 for strictly increasing values, 0 for constant ones.
    """
    below = (value[:, None] > value).sum(1) + 0.5 * (value[:, None] == value).sum(1)
    rank, time = below - below.mean(), np.arange(len(value)) - (len(value) - 1) / 2
    size = float(np.sqrt((rank**2).sum() * (time**2).sum()))
    return float(rank @ time) / size if size else 0.0
