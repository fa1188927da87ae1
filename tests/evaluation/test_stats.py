"""Statistics against golden numbers (reference/algorithms.md 6), and the episodes that a difference takes."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest

from tests.benchmarks.peers.report import ratio
from vla_rl.contract.intervals import difference, paired_difference, wilson
from vla_rl.evaluation.report import mean_text
from vla_rl.evaluation.stats import (
    Difference,
    MeanReturn,
    Rate,
    episodes_needed,
    fisher_z,
    mcnemar_exact,
    mcnemar_power,
    mmrv,
    paired_bootstrap,
)


def test_rate():
    rate = Rate.of([True] * 8 + [False] * 2)
    assert (rate.success, rate.episodes) == (0.8, 10)
    assert (rate.low, rate.high) == pytest.approx((0.44218, 0.96457), abs=1e-5)
    with pytest.raises(ValueError, match="no episode"):
        Rate.of([])


def test_mean_return():
    """By hand: Student's t where nothing is skewed; where one of 64 fails, lower by Hall's than t's 0.953."""
    even = np.tile([1.0, 3.0], 50)
    found = MeanReturn.of(even)
    half = 1.98422 * even.std(ddof=1) / 10
    assert (found.mean, found.score, found.episodes) == (2, 2, 100)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-4)
    rare = MeanReturn.of([1.0] * 63 + [0.0])
    assert (rare.low, rare.high) == pytest.approx((0.8851, 1.0156), abs=1e-3)
    with pytest.raises(ValueError, match="no episode"):
        MeanReturn.of([])


@pytest.mark.parametrize("n", [1, 6, 63])
def test_few_returns_have_no_interval(n):
    """Of 20 returns of 0 or 1 with a mean of .95, a third are all 1: no interval of them holds 95 % of the time."""
    values = np.arange(n) * 1.0
    assert (MeanReturn.of(values).low, MeanReturn.of(values).high) == (None, None)
    assert paired_bootstrap(values + 2.0, values, 0, 10) == Difference(2.0, None, None)
    assert mean_text(2.5, None, None) == "2.5 (too few episodes for an interval)"


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(10, 2, 0.038574), (6, 1, 0.125), (5, 5, 1), (15, 5, 0.041389), (0, 4, 0.125), (0, 6, 0.03125), (0, 0, 1)],
)
def test_mcnemar(b, c, p):
    assert mcnemar_exact(b, c) == mcnemar_exact(c, b) == pytest.approx(p, abs=1e-6)


def outcomes() -> tuple[np.ndarray, np.ndarray]:
    """100 paired episodes: 10 won by the first only, 2 by the second only, 48 by both."""
    a = np.array([1] * 10 + [0] * 2 + [1] * 48 + [0] * 40)
    b = np.array([0] * 10 + [1] * 2 + [1] * 48 + [0] * 40)
    return a, b


def test_paired_bootstrap():
    a, b = (2.0 * one for one in outcomes())
    found = paired_bootstrap(a, b, seed=0, resamples=10_000)
    assert found.mean == pytest.approx(0.16)
    assert (found.low, found.high) == pytest.approx((0.03, 0.30), abs=0.02)
    assert found == paired_bootstrap(a, b, seed=0, resamples=10_000)


def test_the_paired_interval_of_successes_is_a_score_interval():
    found = paired_bootstrap(*outcomes(), seed=0, resamples=10)
    assert (found.mean, found.low, found.high) == (0.08, *paired_difference(10, 2, 100))
    same = paired_bootstrap(np.ones(6), np.ones(6), seed=0, resamples=10)
    assert same.low == pytest.approx(-same.high) and same.low < -0.3, (
        "six episodes without a disagreement are no proof of equality"
    )


RATES, COUNTS = (0.5, 0.8, 0.95, 1.0), (6, 20, 50, 512)


def coverage(intervals: list[tuple[float, float]], weights: np.ndarray, truth: float) -> float:
    low, high = np.array(intervals).T
    return float(weights[(low <= truth + 1e-9) & (truth <= high + 1e-9)].sum())


def chances(n: int, rate: float) -> np.ndarray:
    return np.array([math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1)])


@pytest.mark.full
@pytest.mark.parametrize("n", COUNTS)
def test_intervals_of_rates_and_of_their_difference_cover(n):
    """At least 93 %, exactly: of a rate, and of the difference of two independent ones (20 episodes of the other)."""
    ends, found = [wilson(k, n) for k in range(n + 1)], {}
    apart = [difference((k, n), (m, 20)) for k in range(n + 1) for m in range(21)]
    for rate in RATES:
        found[rate] = coverage(ends, chances(n, rate), rate)
        for other in RATES:
            both = np.outer(chances(n, rate), chances(20, other)).ravel()
            found[rate, other] = coverage(apart, both, rate - other)
    assert min(found.values()) >= 0.93, found


@pytest.mark.full
@pytest.mark.parametrize("common", [0.0, 0.5, 0.9, 1.0])  # share of scenes whose luck both policies have
@pytest.mark.parametrize("n", COUNTS)
def test_the_paired_interval_covers(n, common):
    """At least 93 % of 4000 simulated pairs of evaluations, at all pairs of rates."""
    rng, found = np.random.default_rng(n), {}
    interval = cache(paired_difference)
    for one, other in itertools.product(RATES, RATES):
        luck, own = rng.random((2, 4000, n))
        own = np.where(rng.random((4000, n)) < common, luck, own)
        a, b = luck < one, own < other
        alone = zip((a & ~b).sum(1).tolist(), (~a & b).sum(1).tolist(), strict=True)
        low, high = np.array([interval(*pair, n) for pair in alone]).T
        found[one, other] = float(((low <= one - other + 1e-9) & (one - other <= high + 1e-9)).mean())
    assert min(found.values()) >= 0.93, found


@pytest.mark.full
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("n", [*COUNTS, 64, 100])
def test_intervals_of_mean_returns_cover(n, rate):
    """At least 93 % of 2000: normal, 0 or 1, and skewed with two modes; below 64 there is none, which is no claim."""
    rng, found = np.random.default_rng(n), {}

    def returns(kind: str) -> np.ndarray:
        won = rng.random(n) < rate
        return {"normal": rng.normal(rate, 1.0, n), "0 or 1": won * 1.0, "modes": 10.0 * won + rng.normal(size=n)}[kind]

    for kind, truth in (("normal", rate), ("0 or 1", rate), ("modes", 10 * rate)):
        found[kind] = np.mean([holds(MeanReturn.of(returns(kind)), truth) for _ in range(2000)])
        pairs = (paired_bootstrap(returns(kind), rng.normal(size=n), 0, 200) for _ in range(300 if n > 50 else 1))
        found[f"paired {kind}"] = (
            np.mean([holds(one, truth) for one in pairs]) + 0.02
        )  # of 300, the error of 2000 at 93
    assert min(found.values()) >= 0.93, found


def holds(interval: MeanReturn | Difference, truth: float) -> bool:
    return interval.low is None or bool(interval.low <= truth <= interval.high)


@pytest.mark.full
@pytest.mark.parametrize("n", [6, 20, 50])
def test_intervals_of_a_correlation_and_of_a_ratio_cover(n):
    """Fisher's of policies' rates in the simulator and the world model; Fieller's of seconds on the same seeds."""
    rng, held = np.random.default_rng(n), {"correlation": [], "ratio": []}
    for _ in range(2000):
        x, noise = rng.normal(size=(2, n))
        low, high = fisher_z(float(np.corrcoef(x, 0.8 * x + 0.6 * noise)[0, 1]), n)
        held["correlation"].append(low <= 0.8 <= high)
        ours, other = np.exp(0.3 * rng.normal(size=(2, n)))
        _, low, high = ratio(ours, 1.3 * other)
        held["ratio"].append(low <= 1.3 <= high)
    assert {name: np.mean(hits) for name, hits in held.items() if np.mean(hits) < 0.93} == {}


def test_the_bootstrap_interval_covers_95_percent():
    """Of many continuous differences it is that of the normal distribution; one of 90 % would be 16 % narrower."""
    difference = np.random.default_rng(1).normal(size=400)
    found = paired_bootstrap(difference, np.zeros(400), seed=0, resamples=8000)
    half = 1.959964 * difference.std() / 20
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.05 * half)


def test_paired_bootstrap_within_strata():
    """Strata that explain everything leave nothing to resample; the mean is over episodes, not over strata."""
    a, b = (2.0 * one for one in outcomes())
    found = paired_bootstrap(a, b, seed=0, resamples=100, strata=a - b)
    assert found.low == pytest.approx(found.high) == pytest.approx(0.16)
    by_task = paired_bootstrap(a, b, seed=0, resamples=10_000, strata=["lift"] * 70 + ["stack"] * 30)
    assert 0 <= by_task.low < 0.16 < by_task.high < 0.4


@pytest.mark.parametrize(
    ("simulated", "real", "expected"),
    [
        ((0.2, 0.5, 0.4), (0.1, 0.3, 0.6), 0.2),
        ((0.2, 0.5, 0.5), (0.1, 0.3, 0.6), 0.1),
        ((0.5, 0.5, 0.9), (0.2, 0.4, 0.1), 0.7 / 3),  # a tie charges only the really better policy; ">=" gives 0.8 / 3
        ((0.3, 0.2, 0.1), (0.1, 0.2, 0.3), 0.166667),
        ((0.9, 0.8, 0.7), (0.5, 0.5, 0.1), 0),
        ((0.1, 0.2), (0.4, 0.4), 0),
    ],
)
def test_mmrv(simulated, real, expected):
    assert mmrv(simulated, real) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("r", "k", "low", "high"),
    [(0.78, 51, 0.6425, 0.8688), (0.9, 8, 0.5340, 0.9819), (0.9, 4, -0.4524, 0.9979), (0.5, 10, -0.1892, 0.8592)],
)
def test_fisher_z(r, k, low, high):
    assert fisher_z(r, k) == pytest.approx((low, high), abs=1e-4)


# -- power: simulated evaluations find a difference as often as was asked for ------------------------------------------


@pytest.mark.parametrize(
    ("n", "difference", "discordant"),
    [(60, 0.2, 0.4), (200, 0.1, 0.3), (157, 0.05, 0.05), (9, 0.5, 1)],
)
def test_the_power_is_that_of_simulated_evaluations(n, difference, discordant):
    """McNemar's test of 20,000 evaluations with known probabilities: 4 standard deviations."""
    chances = [(discordant + difference) / 2, (discordant - difference) / 2, 1 - discordant]
    counts = np.random.default_rng(0).multinomial(n, chances, size=20_000)
    p_values = {pair: mcnemar_exact(*pair) for pair in {(int(b), int(c)) for b, c, _ in counts}}
    rejected = np.mean([p_values[int(b), int(c)] <= 0.05 for b, c, _ in counts])
    assert mcnemar_power(n, difference, discordant) == pytest.approx(rejected, abs=4 * 0.5 / np.sqrt(20_000))


def test_without_a_difference_it_errs_at_most_by_its_level():
    assert 0.01 < mcnemar_power(300, 0.0, 0.4) <= 0.05


@pytest.mark.parametrize(
    ("difference", "discordant"),
    [
        (0.1, 0.42),
        (0.05, 0.05),
        (0.3, 0.4),
        pytest.param(0.02, 0.2, marks=pytest.mark.full),
    ],
)
def test_one_episode_less_has_less_power(difference, discordant):
    n = episodes_needed(difference, discordant)
    assert mcnemar_power(n, difference, discordant) >= 0.8 > mcnemar_power(n - 1, difference, discordant)
    assert episodes_needed(-difference, discordant) == n


def test_it_takes_as_many_as_the_normal_approximation_says():
    """Connor 1987: (z_a sqrt(d) + z_b sqrt(d - delta^2))^2 / delta^2; the exact test takes a few more."""
    spread = 1.959964 * np.sqrt(0.3) + 0.841621 * np.sqrt(0.3 - 0.1**2)
    assert (spread / 0.1) ** 2 < episodes_needed(0.1, 0.3) < 1.03 * (spread / 0.1) ** 2 + 10
