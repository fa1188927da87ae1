"""Robustness: how success depends on each parameter of an environment, and its worst case over a set of points.

A point is a policy's episodes with one value of every parameter, on the same seeds as all other points.  The worst case
and the mean over a grid are what robust reinforcement learning reports (RRLS, arXiv 2406.08406).  The lowest of many
estimates is too low on average, so the worst point is chosen by the first half of the episodes and its score is that of
the second half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from vla_rl.contract.errors import ContractError
from vla_rl.contract.task import Parameter
from vla_rl.evaluation.stats import MeanReturn, Rate

Score: TypeAlias = Rate | MeanReturn


@dataclass(frozen=True)
class PerturbedEpisodes:
    """The episodes at one point.

    values   {parameter: value}; parameters that are not named are nominal
    outcome  [n]  bool success, or float return where the environment has no success, in the order of the seeds
    """

    values: Mapping[str, float]
    outcome: np.ndarray

    @property
    def score(self) -> Score:
        """Success rate or mean return with its interval."""
        return _score(self.outcome)


@dataclass(frozen=True)
class CurvePoint:
    """One value of a parameter and the score there, while all others are nominal."""

    value: float
    score: Score


@dataclass(frozen=True)
class WorstCase:
    """The worst of ``points`` points.

    values   of the worst point by the first half of its episodes
    score    of that point in the second half, which had no part in choosing it
    mean     of the scores of all points, all episodes
    ties     other points that were as bad in the first half
    """

    values: Mapping[str, float]
    score: Score
    mean: float
    points: int
    ties: int


def curves(points: Sequence[PerturbedEpisodes], varied: Sequence[Parameter]) -> dict[str, list[CurvePoint]]:
    """For each of ``varied`` the points that differ from nominal in nothing else, by increasing value.

    Parameters without two such points have no curve.
    """
    found = {}
    for parameter in varied:
        others = [other for other in varied if other.name != parameter.name]
        on_axis = [
            CurvePoint(point.values.get(parameter.name, parameter.nominal), point.score)
            for point in points
            if all(point.values.get(other.name, other.nominal) == other.nominal for other in others)
        ]
        if len(on_axis) > 1:
            found[parameter.name] = sorted(on_axis, key=lambda item: item.value)
    return found


def worst_case(points: Sequence[PerturbedEpisodes]) -> WorstCase:
    """The worst of ``points``; raises ContractError unless all have the same number of episodes, at least 2."""
    lengths = {len(point.outcome) for point in points}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ContractError(
            f"the points have {sorted(lengths)} episodes, so no worst one can be chosen by half of them; play the same "
            "seeds, at least 2, at every point."
        )
    half = lengths.pop() // 2
    first = [float(point.outcome[:half].mean()) for point in points]
    worst = points[int(np.argmin(first))]
    mean = float(np.mean([point.score.score for point in points]))
    return WorstCase(worst.values, _score(worst.outcome[half:]), mean, len(points), first.count(min(first)) - 1)


def _score(outcome: np.ndarray) -> Score:
    return Rate.of(outcome) if outcome.dtype == np.bool_ else MeanReturn.of(outcome)
