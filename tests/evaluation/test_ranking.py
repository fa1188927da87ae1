"""Ranking policies by imagined and real outcomes: against importance sampling, by hand, on simulated robots."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation import ranking
from vla_rl.evaluation.agreement import kendall_tau_b
from vla_rl.evaluation.ranking import (
    CONFIDENCE,
    MOST,
    SPREAD,
    TOLERANCE,
    Played,
    Tried,
    expected_searches,
    find_best,
    log_odds,
    rank,
)


def flags(successes: int, n: int, shift: int = 0) -> np.ndarray:
    return np.roll(np.arange(n) < successes, shift)


def by_name(found) -> dict:
    return {one.name: one for one in found.estimates}


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_the_posterior_is_that_of_importance_sampling():
    """Three policies, one known; a million draws of the prior, weighted by the likelihood of what was seen."""
    policies = [Played("a", flags(30, 60), (14, 20)), Played("b", flags(36, 60, 7)), Played("c", flags(12, 60, 30))]
    found = rank(policies)
    rng = np.random.default_rng(1)
    truth = rng.normal(0, 3, (1_000_000, 3))
    strictness = rng.normal(0, 1, (1_000_000, 1))
    imagined = np.stack([one.imagined for one in policies])
    noise = ranking.noise_covariance(imagined) + SPREAD**2 * np.eye(3)
    x = np.array([log_odds(int(row.sum()), 60) for row in imagined])
    residual = x - (truth - strictness)
    log_weight = -0.5 * np.einsum("ni,ij,nj->n", residual, np.linalg.inv(noise), residual)
    log_weight -= 0.5 * (log_odds(14, 20) - truth[:, 0]) ** 2 / (1 / 14.5 + 1 / 6.5)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / (weight**2).sum() > 2_000  # effective draws
    for i, one in enumerate(policies):
        mean = float(weight @ truth[:, i])
        deviation = math.sqrt(float(weight @ (truth[:, i] - mean) ** 2))
        estimate = by_name(found)[one.name]
        assert logit(estimate.success) == pytest.approx(mean, abs=0.06)
        assert (logit(estimate.high) - logit(estimate.low)) / (2 * 2.4) == pytest.approx(deviation, rel=0.06)
    order = {one.name: i for i, one in enumerate(policies)}
    for pair in found.pairs:
        better = truth[:, order[pair.better]] > truth[:, order[pair.worse]]
        assert pair.probability == pytest.approx(float(weight @ better), abs=0.02)
    best = np.bincount(truth.argmax(1), weights=weight, minlength=3)
    assert [by_name(found)[one.name].best for one in policies] == pytest.approx(best.tolist(), abs=0.02)


def test_strict_dreams_are_corrected_by_what_is_known():
    """Three known policies succeed 80, 60 and 40 % for real where they are imagined at 60, 36 and 20 %."""
    n = 20_000
    known = [(0.6, 0.8), (0.36, 0.6), (0.2, 0.4)]
    policies = [
        Played(f"known {i}", flags(round(x * n), n, 997 * i), (round(t * n), n)) for i, (x, t) in enumerate(known)
    ]
    found = rank([*policies, Played("new", flags(round(0.5 * n), n, 5000))])
    shift = np.mean([logit(t) - logit(x) for x, t in known])
    assert found.strictness == pytest.approx(shift, abs=0.04)  # a little of the prior is left
    new = by_name(found)["new"]
    assert logit(new.success) == pytest.approx(logit(0.5) + shift, abs=0.03)
    assert new.low < new.success < new.high and new.high - new.low < 0.28
    blind = by_name(rank([Played("a", flags(n // 2, n)), Played("b", flags(n // 4, n))]))["a"]
    assert blind.high - blind.low > 0.3, "nothing is known about how strict dreams are"


def test_how_strict_dreams_are_says_nothing_about_which_is_better():
    pair = [Played("a", flags(40, 60)), Played("b", flags(20, 60, 9))]
    alone = rank(pair).pairs[0].probability
    third = Played("c", flags(30, 60, 31), (900, 1000))
    together = next(one for one in rank([*pair, third]).pairs if {one.better, one.worse} == {"a", "b"})
    assert together.probability == pytest.approx(alone, abs=0.02)


def test_the_same_starts_decide_more_than_others_would():
    """Twenty more successes of a hundred: on top of the other's, or spread over all starts."""
    nested = rank([Played("a", flags(60, 100)), Played("b", flags(40, 100))]).pairs[0]
    apart = rank([Played("a", flags(60, 100)), Played("b", flags(40, 100, 50))]).pairs[0]
    assert nested.probability > apart.probability > 0.5


def test_the_spread_between_policies_by_hand():
    """Between them, with equal weights: the sample variance of the gaps less their noise, at least 0."""
    n, gaps = 100, (-0.4, 0.0, 0.4)
    policies = [
        Played(str(i), flags(n // 2, n, 10 * i), (round(n / (1 + math.exp(-gap))), n)) for i, gap in enumerate(gaps)
    ]
    noise, guess = 8 / n, 2 * SPREAD**2  # of two logits near one half; the guess counts as two degrees of freedom
    for m in (2, 3):
        between = np.var(gaps[:m], ddof=1) - noise
        expected = math.sqrt(((m - 1) * between + guess) / (m + 1))
        assert rank(policies[:m]).spread == pytest.approx(expected, rel=0.02)
    same = [Played(str(i), flags(n // 2, n, i), (n // 2, n)) for i in range(3)]
    assert rank(same).spread == pytest.approx(math.sqrt(guess / 4))
    unknown = [Played(one.name, one.imagined) for one in policies]
    assert rank(unknown).spread == rank([*unknown[:2], policies[2]]).spread == SPREAD, "one says nothing"


@pytest.mark.parametrize("real", [(0, 0), (20, 40)])
def test_as_many_real_episodes_as_it_says_decide_it(real):
    policies = [Played("a", flags(33, 60), real), Played("b", flags(24, 60, 13))]
    pair = rank(policies).pairs[0]
    assert pair.episodes is not None and pair.episodes_alone is not None and not pair.decided
    assert 1 < pair.episodes < pair.episodes_alone
    found = rank(policies)
    mean = np.array([logit(by_name(found)[name].success) for name in (pair.better, pair.worse)])
    rates = 1 / (1 + np.exp(-mean))
    imagined = np.stack([one.imagined for one in policies])
    noise = ranking.noise_covariance(imagined)
    covariance = ranking.posterior(policies, imagined, noise, SPREAD)[1]
    for n, decides in ((pair.episodes, True), (pair.episodes - 1, False)):
        after = np.linalg.inv(np.linalg.inv(covariance) + np.diag(n * rates * (1 - rates)))
        deviation = math.sqrt(after[0, 0] + after[1, 1] - 2 * after[0, 1])
        assert ((mean[0] - mean[1]) / deviation > 1.96) == decides
    assert rank([Played("a", flags(190, 200)), Played("b", flags(10, 200))]).pairs[0].decided
    equal = rank([Played("a", flags(30, 60)), Played("b", flags(30, 60, 30))]).pairs[0]
    assert equal.episodes is None, "of two that are estimated equal none is better"


def test_on_simulated_robots_it_orders_and_its_intervals_hold():
    """World models that are too strict and err by policy; five of twelve policies are known from 60 real episodes."""
    rng = np.random.default_rng(3)
    held, taus, decided_wrong, decided = [], [], 0, 0
    for _ in range(16):
        truth = rng.normal(0.3, 1.2, 12)
        strictness, errors = rng.normal(0, 1), rng.normal(0, 0.3, 12)
        difficulty = rng.normal(0, 1, 200)
        policies = []
        for i in range(12):
            dreams = rng.random(200) < 1 / (1 + np.exp(-(truth[i] - strictness + errors[i] + 0.3 * difficulty)))
            wins = int((rng.random(60) < 1 / (1 + math.exp(-truth[i]))).sum())
            policies.append(Played(str(i), dreams, (wins, 60) if i < 5 else (0, 0)))
        found = rank(policies)
        estimates = by_name(found)
        for i in range(12):
            held.append(estimates[str(i)].low <= 1 / (1 + math.exp(-truth[i])) <= estimates[str(i)].high)
        taus.append(kendall_tau_b(np.array([estimates[str(i)].success for i in range(12)]), truth))
        for pair in found.pairs:
            decided += pair.decided
            decided_wrong += pair.decided and truth[int(pair.better)] < truth[int(pair.worse)]
    assert 0.90 < np.mean(held) <= 1.0  # of 192: two standard errors below 94 %
    assert np.mean(taus) > 0.7
    assert decided > 200 and decided_wrong / decided < 0.025


@pytest.mark.full
@pytest.mark.parametrize("n", [6, 20, 50, 512])
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95, 1.0])
def test_its_intervals_cover_the_truth(n, rate, monkeypatch):
    """400 world models that err as the prior guesses, ``n`` real episodes of three of five policies."""
    monkeypatch.setattr(ranking, "_DRAWS", 10)  # of who is the best, which is another number
    rng = np.random.default_rng([n, round(100 * rate)])
    rates, known = np.array([rate, rate, 0.3, 0.5, 0.7]), [True, False, True, True, False]
    truth = np.array([logit(min(one, 1 - 1e-12)) for one in rates])
    held = np.zeros((400, 5))
    for row in held:
        tilt = rng.normal(0, SPREAD, 5) - rng.normal(0, 1)
        chance = 1 / (1 + np.exp(-(truth + tilt)[:, None] - rng.normal(0, 0.3, 200)))
        dreams = rng.random((5, 200)) < chance
        real = [(int(rng.binomial(n, one)), n) if seen else (0, 0) for one, seen in zip(rates, known, strict=True)]
        estimates = by_name(rank([Played(str(i), dreams[i], real[i]) for i in range(5)]))
        row[:] = [estimates[str(i)].low <= rates[i] <= estimates[str(i)].high for i in range(5)]
    assert held.mean(0).min() >= 0.93


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ([("a", 10)], "no two policies"),
        ([("a", 10), ("a", 10)], "with names of their own"),
        ([("a", 10), ("b", 12)], r"\[10, 12\] imagined rollouts"),
        ([("a", 0), ("b", 0)], r"\[0\] imagined rollouts"),
    ],
)
def test_what_cannot_be_ranked_is_refused(policies, said):
    with pytest.raises(UserError, match=said):
        rank([Played(name, flags(n // 2, n)) for name, n in policies])


def test_pairs_are_all_of_them_the_better_first():
    found = rank([Played(name, flags(n, 40, n)) for name, n in (("low", 8), ("high", 30), ("middle", 20))])
    assert [one.name for one in found.estimates] == ["high", "middle", "low"]
    expected = list(itertools.combinations(["high", "middle", "low"], 2))
    assert [(one.better, one.worse) for one in found.pairs] == expected
    assert all(one.probability >= 0.5 for one in found.pairs)
    assert sum(one.best for one in found.estimates) == pytest.approx(1)


# -- searches for the best, which imagined rollouts shorten ------------------------------------------------------------

NOTHING_KNOWN = 1e3  # a spread at which imagined rollouts say nothing

FOUR = [Played(*one) for one in zip("abcd", [flags(won, 200, won) for won in (130, 110, 90, 70)], strict=True)]


def test_what_is_found_is_good_enough_as_often_as_it_says():
    """Policies as the prior has them, imagined by a world model that errs by as much as is believed."""
    rng, good, spread = np.random.default_rng(1), list[bool](), 0.35
    for _ in range(15):
        log_odds = rng.normal(0, 1, 4)
        dreams = 1 / (1 + np.exp(-(log_odds - 0.5 + rng.normal(0, spread, 4))))
        truth = 1 / (1 + np.exp(-log_odds))
        policies = [Played(str(i), rng.random(200) < dreams[i]) for i in range(4)]
        found = find_best(policies, truth, spread, rng).found
        good.append(truth[found] >= truth.max() - TOLERANCE)
    assert sum(good) >= CONFIDENCE * 15 - 3 * math.sqrt(15 * CONFIDENCE * (1 - CONFIDENCE))


def test_imagined_rollouts_shorten_a_search():
    truth = np.array([0.7, 0.6, 0.5, 0.4])
    reverse = [Played(one.name, other.imagined) for one, other in zip(FOUR, FOUR[::-1], strict=True)]

    def episodes(policies, spread):
        rng = np.random.default_rng(0)
        return np.array([find_best(policies, truth, spread, rng).episodes for _ in range(5)])

    assert np.median(episodes(FOUR, 0.1)) < 0.5 * np.median(episodes(FOUR, NOTHING_KNOWN))
    alone, misled = np.median(episodes(FOUR, NOTHING_KNOWN)), np.median(episodes(reverse, NOTHING_KNOWN))
    assert misled == pytest.approx(alone, rel=0.5)


def test_a_search_plays_between_nothing_and_its_most():
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
def test_what_is_expected_are_searches_among_such_truths():
    found = expected_searches(FOUR, rank(FOUR), count=15)
    assert len(found.informed) == len(found.alone) == 15
    assert np.median(found.informed) < np.median(found.alone)


# -- decisions that leave what was tried -------------------------------------------------------------------------------


def test_distances_are_in_deviations_to_another_episode():
    """Two lines of fifty decisions, two standard deviations apart: neighbours on the same line do not count."""
    along, episode = np.repeat(np.arange(50.0), 2), np.tile([0, 1], 50)
    state = np.stack([along, 10.0 * episode], 1)
    found = Tried.of(state, np.zeros((100, 1, 1)), episode)
    unit = 3**0.5  # relative to the root of three entries
    assert found.limit == pytest.approx(2 / unit)
    step = along.std()
    asked = np.array([[10.2, 0], [49 + 1.9 * step, 10], [49 + 2.1 * step, 10], [25, -9.9], [25, -10.1]])
    assert found.left(asked, np.zeros((5, 1, 1))).tolist() == [False, False, True, False, True]


def test_an_action_that_nobody_took_there_leaves_it():
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, (600, 3))
    chunk = np.repeat(state[:, None, :2], 5, 1) + rng.normal(0, 0.05, (600, 5, 2))
    episode = np.arange(600) // 20
    found = Tried.of(state, chunk, episode)
    assert found.left(state[:100], chunk[:100]).mean() == 0, "what was recorded is at distance 0"
    new = rng.uniform(-0.9, 0.9, (200, 3))
    alike = np.repeat(new[:, None, :2], 5, 1) + rng.normal(0, 0.05, (200, 5, 2))
    assert found.left(new, alike).mean() < 0.1
    assert found.left(new, -alike + 3).mean() == 1
    assert found.left(new[:0], alike[:0]).shape == (0,)
