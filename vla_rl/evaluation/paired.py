"""Two policies on the same episodes: which one is better, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
