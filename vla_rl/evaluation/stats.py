"""Intervals of success rates and of differences of two policies, and how many paired episodes show a difference.

Episodes are the unit for one fixed policy, training seeds for claims about training; the two are never pooled.  Two
policies play the same seeds; only the pairs of which one policy alone succeeds (discordant pairs) say anything, so the
episodes that a difference takes depend on it and on their share.  That share lies between the difference itself (one
policy wins wherever the other does, and more) and that of independent outcomes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import Z95, paired_difference, student, wilson
from vla_rl.evaluation.results import EpisodeResult

Floats: TypeAlias = NDArray[np.float64]
FEWEST = 64  # episodes for an interval of mean returns: of fewer, 4 % or more show no outcome that comes in 5 %


@dataclass(frozen=True)
class Rate:
    """A success rate in [0, 1] of one fixed policy with its 95 % Wilson interval."""

    success: float
    low: float
    high: float
    episodes: int

    @classmethod
    def of(cls, successes: ArrayLike) -> Rate:
        """From one flag per episode, [n]."""
        flags = np.asarray(successes, dtype=bool)
        if flags.size == 0:
            raise ValueError("no episode was run, so there is no success rate; run at least one.")
        return cls.counted(int(flags.sum()), flags.size)

    @classmethod
    def counted(cls, successes: int, episodes: int) -> Rate:
        return cls(successes / episodes, *wilson(successes, episodes), episodes)

    @property
    def score(self) -> float:
        """The number that policies are compared by."""
        return self.success


@dataclass(frozen=True)
class MeanReturn:
    """The mean return of one fixed policy with its 95 % interval (:func:`mean_interval`); None below 64 episodes."""

    mean: float
    low: float | None
    high: float | None
    episodes: int

    @classmethod
    def of(cls, returns: ArrayLike) -> MeanReturn:
        """From one undiscounted return per episode, [n]."""
        values = np.asarray(returns, dtype=np.float64)
        if values.size == 0:
            raise ValueError("no episode was run, so there is no mean return; run at least one.")
        low, high = mean_interval(values, np.zeros(values.size)) or (None, None)
        return cls(float(values.mean()), low, high, values.size)

    @property
    def score(self) -> float:
        """The number that policies are compared by."""
        return self.mean


@dataclass(frozen=True)
class Difference:
    """A mean difference of two policies on the same seeds with its interval; None for returns of below 64 pairs."""

    mean: float
    low: float | None
    high: float | None


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p-value that policies with ``b`` and ``c`` discordant episodes are equal (exact binomial test)."""
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, float(2 * tail / 2 ** (b + c)))


def mean_interval(values: Floats, strata: NDArray[Any]) -> tuple[float, float] | None:
    """95 % interval of the mean of ``values`` [n]; ``strata`` [n] keep their sizes.  None below ``FEWEST`` values.

    Student's t, widened at either end to Hall's interval, which follows the skewness (Hall 1992, Journal of the Royal
    Statistical Society B 54:221): t alone holds 83 % of the time for 64 returns of 0 or 1 with a mean of .95.  No
    interval of the mean of few values holds for all distributions: a rare outcome is not among them.
    """
    groups = np.unique(strata)
    n, freedom = values.size, values.size - len(groups)
    if n < FEWEST or not freedom:
        return None
    mean, gap = float(values.mean()), values.astype(np.float64)
    for group in groups:
        gap[strata == group] -= gap[strata == group].mean()
    deviation = math.sqrt(float((gap**2).sum()) / freedom)
    skewness = float((gap**3).mean()) / deviation**3 if deviation else 0.0

    def hall(t: float) -> float:
        if abs(skewness) < 1e-6:
            return t
        return 3.0 / skewness * (float(np.cbrt(1.0 + skewness * (t - skewness / (6 * n)))) - 1.0)

    half = student(freedom) / math.sqrt(n)
    return mean - deviation * max(half, hall(half)), mean + deviation * max(half, -hall(-half))


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, seed: int, resamples: int, strata: ArrayLike | None = None
) -> Difference:
    """Mean of ``a - b`` [n], results on the same episodes, with its 95 % interval.

    Of successes (0 or 1) it is Tango's score interval (``intervals.paired_difference``) of all pairs, which a bootstrap
    of few or hardly different pairs makes far too narrow; pairs of several tasks make it a little wide.  Of other
    numbers it is the percentile interval of resampled pairs, as much wider as Student's t is than the normal, and at
    least :func:`mean_interval`.  ``strata`` [n] (the task of each episode) keeps every stratum's size.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    difference = first - second
    if np.isin([first, second], (0.0, 1.0)).all():
        alone = int((difference > 0).sum()), int((difference < 0).sum())
        return Difference(float(difference.mean()), *paired_difference(*alone, difference.size))
    groups = np.zeros(difference.size, dtype=np.int64) if strata is None else np.asarray(strata)
    mean, least = float(difference.mean()), mean_interval(difference, groups)
    if least is None:
        return Difference(mean, None, None)
    generator = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for group in np.unique(groups):
        members = difference[groups == group]
        draws = (generator.integers(members.size, size=members.size) for _ in range(resamples))
        total += np.fromiter((members[draw].sum() for draw in draws), dtype=np.float64, count=resamples)
    n, freedom = difference.size, difference.size - len(np.unique(groups))
    wider = student(freedom) / Z95 * math.sqrt(n / freedom)
    low, high = mean + wider * (np.quantile(total / n, [0.025, 0.975]) - mean)
    return Difference(mean, min(float(low), least[0]), max(float(high), least[1]))


def mmrv(simulated: Sequence[float] | Floats, real: Sequence[float] | Floats) -> float:
    """Mean maximum rank violation of ``k`` policies' success rates (SIMPLER, arXiv 2405.05941); 0 is a perfect ranking.

    ``mean_i max_j |R_i - R_j| [(S_i > S_j) != (R_i > R_j)]``: the gap is the real one.  ">" is strict, as in SIMPLER's
    code, so of two policies tied in simulation only the really better one is charged.
    """
    s, r = np.asarray(simulated, dtype=np.float64), np.asarray(real, dtype=np.float64)
    violated: NDArray[Any] = (s[:, None] > s[None, :]) != (r[:, None] > r[None, :])
    return float(np.max(np.abs(r[:, None] - r[None, :]) * violated, axis=1).mean())


def fisher_z(r: float, k: int, z: float = Z95) -> tuple[float, float]:
    """Interval ``tanh(atanh r +- z/sqrt(k-3))`` of a correlation over ``k`` policies (Fisher 1921)."""
    if k < 4 or abs(r) >= 1.0:
        raise ValueError(f"a correlation of {r} over {k} policies has no interval; it takes 4 or more and |r| < 1.")
    half = z / math.sqrt(k - 3)
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


RESAMPLES, BOOTSTRAP_SEED = 10_000, 0


@dataclass(frozen=True)
class Pairs:
    """``episodes`` pairs, ``first_alone`` and ``second_alone`` of which one policy alone won.

    ``difference`` is first minus second with its 95 % interval (``paired_bootstrap``, returns within tasks);
    ``p_value`` that of McNemar's exact two-sided test.  Without a notion of success the difference is that of returns,
    and there is no test (None).
    """

    episodes: int
    first_alone: int
    second_alone: int
    difference: Difference
    p_value: float | None


def pairs_of(first: Sequence[EpisodeResult], second: Sequence[EpisodeResult], by_success: bool) -> Pairs:
    """Compare the same (task, seed) of both, in whatever order; raises KeyError when one lacks an episode."""
    other = {episode.key: episode for episode in second}
    matched = [(episode, other[episode.key]) for episode in first]
    tasks = np.array([episode.task for episode, _ in matched])
    if by_success:
        return paired_successes(*(np.array([pair[side].success for pair in matched]) for side in (0, 1)))
    a, b = (np.array([pair[side].returns for pair in matched]) for side in (0, 1))
    return Pairs(len(matched), 0, 0, paired_bootstrap(a, b, BOOTSTRAP_SEED, RESAMPLES, strata=tasks), None)


def paired_successes(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Pairs:
    """Compare successes [n] of both on the same episodes."""
    alone = int((first & ~second).sum()), int((second & ~first).sum())
    difference = paired_bootstrap(first, second, BOOTSTRAP_SEED, RESAMPLES)
    return Pairs(len(first), *alone, difference, mcnemar_exact(*alone))


_SPREAD = 10.0  # standard deviations of a binomial that are summed over; beyond, less than 1e-20 is left out
_LEAST = 0.005  # a difference that takes up to 157,000 pairs


def independent_discordance(success: float, difference: float) -> float:
    """Share of discordant pairs of two policies with ``success`` and ``success + difference``, if independent."""
    other = success + difference
    return success * (1.0 - other) + other * (1.0 - success)


def mcnemar_power(n: int, difference: float, discordant: float, level: float = 0.05) -> float:
    """Probability that McNemar's exact two-sided test of ``n`` pairs rejects equality at ``level``.

    ``discordant`` is the share of discordant pairs and ``difference`` that of the success rates, in [-discordant,
    discordant].  The number of discordant pairs is binomial, and so is the number that the better policy wins.
    """
    better = 0.5 * (1.0 + difference / discordant)
    pairs, weights = _binomial(n, discordant)
    return float(weights @ np.array([_rejected(int(m), better, level) for m in pairs]))


def episodes_needed(difference: float, discordant: float, power: float = 0.8, level: float = 0.05) -> int:
    """Pairs with which McNemar's exact test at ``level`` finds ``difference`` with probability ``power``.

    Raises UserError for a difference that is none, or that so few discordant pairs cannot make.
    """
    if not 0 < abs(difference) <= discordant <= 1:
        raise UserError(
            f"a difference of {difference:g} with a share of {discordant:g} discordant pairs does not exist, so no "
            "number of episodes shows it; give a difference above 0 that is at most that share."
        )
    if abs(difference) < _LEAST:
        raise UserError(
            f"a difference of {difference:g} takes more episodes than anybody plays; ask for one of at least "
            f"{_LEAST:g}."
        )

    def shows(n: int) -> bool:
        return mcnemar_power(n, difference, discordant, level) >= power

    high = 16
    while not shows(high):
        high *= 2
    return bisect_left(range(high), True, lo=high // 2 if high > 16 else 1, key=shows)


@cache  # a search for the number of episodes comes by the same numbers of pairs again and again
def _rejected(pairs: int, better: float, level: float) -> float:
    """Probability of a rejection with ``pairs`` discordant pairs, of which one policy wins each with ``better``."""
    wins, chances = _binomial(pairs, 0.5)
    too_few = wins[2.0 * np.cumsum(chances) <= level]
    if not len(too_few):
        return 0.0
    sides = (_binomial(pairs, better), _binomial(pairs, 1.0 - better))
    return sum(float(chances[wins <= too_few[-1]].sum()) for wins, chances in sides)


def _binomial(n: int, p: float) -> tuple[NDArray[np.int64], Floats]:
    """The counts that are likely enough to matter, and their probabilities."""
    if p in (0.0, 1.0):
        return np.array([int(n * p)]), np.ones(1)
    spread = _SPREAD * math.sqrt(n * p * (1.0 - p)) + 1.0
    counts = np.arange(max(0, math.floor(n * p - spread)), min(n, math.ceil(n * p + spread)) + 1)
    first = math.lgamma(n + 1) - math.lgamma(counts[0] + 1) - math.lgamma(n - counts[0] + 1)
    steps = np.log(n - counts[:-1]) - np.log(counts[1:])  # from one number of ways to the next
    ways = first + np.concatenate([[0.0], np.cumsum(steps)])
    return counts, np.exp(ways + counts * math.log(p) + (n - counts) * math.log1p(-p))
