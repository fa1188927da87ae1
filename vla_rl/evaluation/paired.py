"""Two policies on the same episodes: which one is better, and how sure that is.

How many paired episodes it takes to see a difference of two success rates, by the exact power of McNemar's test.

Two policies play the same seeds; only the pairs of which one policy alone succeeds (discordant pairs) say anything.  So
the number depends on the difference and on the share of discordant pairs, which the two policies decide.  It lies
between the difference itself (one policy wins wherever the other does, and more) and that of independent outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.stats import Difference, mcnemar_exact, paired_bootstrap

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

    @property
    def discordant(self) -> float:
        """Share of pairs of which one policy alone won."""
        return (self.first_alone + self.second_alone) / self.episodes


def pairs_of(first: Sequence[EpisodeResult], second: Sequence[EpisodeResult], by_success: bool) -> Pairs:
    """Compare the same (task, seed) of both, in whatever order; raises KeyError when one lacks an episode."""
    other = {episode.key: episode for episode in second}
    matched = [(episode, other[episode.key]) for episode in first]
    tasks = np.array([episode.task for episode, _ in matched])
    a, b = (np.array([_value(pair[side], by_success) for pair in matched]) for side in (0, 1))
    difference = paired_bootstrap(a, b, BOOTSTRAP_SEED, RESAMPLES, strata=tasks)
    if not by_success:
        return Pairs(len(matched), 0, 0, difference, None)
    alone = int((a > b).sum()), int((b > a).sum())
    return Pairs(len(matched), *alone, difference, mcnemar_exact(*alone))


def pairs_by_task(
    first: Sequence[EpisodeResult], second: Sequence[EpisodeResult], by_success: Mapping[str, bool]
) -> dict[str, Pairs]:
    """:func:`pairs_of` for each of the tasks ``by_success``, which says how a task is judged."""

    def of(episodes: Sequence[EpisodeResult], task: str) -> list[EpisodeResult]:
        return [episode for episode in episodes if episode.task == task]

    return {task: pairs_of(of(first, task), of(second, task), judged) for task, judged in by_success.items()}


def _value(episode: EpisodeResult, by_success: bool) -> float:
    return float(episode.success) if by_success else episode.returns


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
    pairs = _window(n, discordant)
    weights = _pmf(pairs, n, discordant)
    rejected = [_tails(int(m), better, level) for m in pairs]
    return float(weights @ np.array(rejected))


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
    low, high = 0, 16
    while mcnemar_power(high, difference, discordant, level) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if mcnemar_power(middle, difference, discordant, level) >= power else (middle, high)
    return high


def _tails(pairs: int, better: float, level: float) -> float:
    """Probability of a rejection with ``pairs`` discordant pairs, of which one policy wins each with ``better``."""
    wins = _window(pairs, 0.5)
    tail = np.cumsum(_pmf(wins, pairs, 0.5))
    critical = int(np.searchsorted(2.0 * tail, level, side="right")) - 1  # the most wins that are too few
    if critical < 0:
        return 0.0
    most = int(wins[critical])
    return _cdf(most, pairs, better) + _cdf(most, pairs, 1.0 - better)


def _cdf(most: int, n: int, p: float) -> float:
    counts = _window(n, p)
    return float(_pmf(counts[counts <= most], n, p).sum())


def _window(n: int, p: float) -> NDArray[np.int64]:
    """The counts of a binomial that are likely enough to matter."""
    spread = _SPREAD * math.sqrt(n * p * (1.0 - p)) + 1.0
    return np.arange(max(0, math.floor(n * p - spread)), min(n, math.ceil(n * p + spread)) + 1)


def _pmf(counts: NDArray[np.int64], n: int, p: float) -> NDArray[np.float64]:
    """Binomial probabilities of ``counts``."""
    if p in (0.0, 1.0):
        certain: NDArray[np.float64] = (counts == n * p).astype(np.float64)
        return certain
    log_factorial = _log_factorials(n)
    ways = log_factorial[n] - log_factorial[counts] - log_factorial[n - counts]
    found: NDArray[np.float64] = np.exp(ways + counts * math.log(p) + (n - counts) * math.log1p(-p))
    return found


_table = np.zeros(1)


def _log_factorials(n: int) -> NDArray[np.float64]:
    """``log(0!), ..., log(n!)`` and perhaps more, kept from call to call."""
    global _table
    if len(_table) <= n:
        _table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, 2 * n + 1)))])
    return _table
