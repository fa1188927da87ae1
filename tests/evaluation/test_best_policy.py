"""Searches for the best of several policies: they find it as often as they say, and imagined rollouts shorten them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.evaluation.test_ranking import flags
from vla_rl.evaluation import ranking
from vla_rl.evaluation.ranking import CONFIDENCE, MOST, TOLERANCE, Played, expected_searches, find_best, rank

NOTHING_KNOWN = 1e3  # a spread at which imagined rollouts say nothing
FOUR = [Played(*one) for one in zip("abcd", [flags(won, 200, won) for won in (130, 110, 90, 70)], strict=True)]


def test_what_is_found_is_good_enough_as_often_as_it_says():
    """Policies as the prior has them, imagined by a world model that errs by as much as is believed."""
    rng, good, spread = np.random.default_rng(1), list[bool](), 0.35
    for _ in range(60):
        log_odds = rng.normal(0, 1, 4)
        dreams = 1 / (1 + np.exp(-(log_odds - 0.5 + rng.normal(0, spread, 4))))
        truth = 1 / (1 + np.exp(-log_odds))
        policies = [Played(str(i), rng.random(200) < dreams[i]) for i in range(4)]
        found = find_best(policies, truth, spread, rng).found
        good.append(truth[found] >= truth.max() - TOLERANCE)
    assert sum(good) >= CONFIDENCE * 60 - 3 * math.sqrt(60 * CONFIDENCE * (1 - CONFIDENCE))


def test_imagined_rollouts_shorten_a_search_and_without_them_nothing_is_known_of_them():
    truth = np.array([0.7, 0.6, 0.5, 0.4])
    reverse = [Played(one.name, other.imagined) for one, other in zip(FOUR, FOUR[::-1], strict=True)]

    def episodes(policies, spread):
        rng = np.random.default_rng(0)
        return np.array([find_best(policies, truth, spread, rng).episodes for _ in range(10)])

    assert np.median(episodes(FOUR, 0.1)) < 0.5 * np.median(episodes(FOUR, NOTHING_KNOWN))
    alone, misled = np.median(episodes(FOUR, NOTHING_KNOWN)), np.median(episodes(reverse, NOTHING_KNOWN))
    assert misled == pytest.approx(alone, rel=0.5)


def test_what_imagined_rollouts_decide_needs_no_episode_and_what_is_equal_needs_no_more_than_a_search_may_play():
    sure = [Played("a", flags(395, 400)), Played("b", flags(5, 400))]
    assert find_best(sure, np.array([0.9, 0.1]), 0.1, np.random.default_rng(0)) == ranking.Search(0, 0)
    many = [Played(str(i), flags(100, 200, i)) for i in range(8)]
    assert find_best(many, np.full(8, 0.5), 0.35, np.random.default_rng(0)).episodes <= MOST


def test_real_episodes_that_were_played_are_not_played_again():
    known = [Played(one.name, one.imagined, (won, 400)) for one, won in zip(FOUR, (320, 240, 200, 160), strict=True)]
    truth = np.array([0.8, 0.6, 0.5, 0.4])
    assert find_best(known, truth, NOTHING_KNOWN, np.random.default_rng(0)) == ranking.Search(0, 0)


def test_episodes_go_to_the_two_that_may_be_best(monkeypatch):
    """A policy that imagined rollouts rule out is not played."""
    asked: list[float] = []

    class Counting(np.random.Generator):
        def binomial(self, n, p):
            asked.append(p)
            return super().binomial(n, p)

    policies = [Played("a", flags(120, 200)), Played("b", flags(119, 200, 5)), Played("c", flags(4, 200))]
    find_best(policies, np.array([0.75, 0.6, 0.02]), 0.2, Counting(np.random.PCG64(1)))
    assert set(asked) == {0.75, 0.6} and asked.count(0.75) == asked.count(0.6)


@pytest.mark.full
def test_what_is_expected_are_searches_among_truths_that_are_believed():
    found = expected_searches(FOUR, rank(FOUR), count=15)
    assert len(found.informed) == len(found.alone) == 15
    assert np.median(found.informed) < np.median(found.alone)
