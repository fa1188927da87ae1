"""Statistics against golden numbers (reference/algorithms.md 6)."""

import math

import numpy as np
import pytest

from vla_rl.contract.intervals import paired_difference
from vla_rl.evaluation.stats import (
    MeanReturn,
    Rate,
    fisher_z,
    mcnemar_exact,
    mmrv,
    paired_bootstrap,
)


def test_rate():
    rate = Rate.of([True] * 8 + [False] * 2)
    assert (rate.success, rate.episodes) == (0.8, 10)
    assert (rate.low, rate.high) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    with pytest.raises(ValueError, match="no episode"):
        Rate.of([])


def test_mean_return():
    found = MeanReturn.of([1.0, 2.0, 6.0])  # sample variance 7
    assert (found.mean, found.score, found.episodes) == (3, 3, 3)
    assert (found.low, found.high) == pytest.approx((3 - 4.302653 * (7 / 3) ** 0.5, 3 + 4.302653 * (7 / 3) ** 0.5))
    assert MeanReturn.of([4.0]).high == math.inf
    with pytest.raises(ValueError, match="no episode"):
        MeanReturn.of([])


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(10, 2, 0.038574), (6, 1, 0.125), (5, 5, 1), (15, 5, 0.041389), (0, 4, 0.125), (0, 6, 0.03125), (0, 0, 1)],
)
def test_mcnemar(b, c, p):
    assert mcnemar_exact(b, c) == mcnemar_exact(c, b) == pytest.approx(p, abs=1e-6)


def test_mcnemar_of_many_episodes():
    assert 0 < mcnemar_exact(3000, 2000) < 1e-40


def outcomes() -> tuple[np.ndarray, np.ndarray]:
    """100 paired episodes: 10 won by the first only, 2 by the second only, 48 by both."""
    a = np.array([1] * 10 + [0] * 2 + [1] * 48 + [0] * 40)
    b = np.array([0] * 10 + [1] * 2 + [1] * 48 + [0] * 40)
    return a, b


def test_paired_bootstrap():
    a, b = (2.0 * one for one in outcomes())
    found = paired_bootstrap(a, b, seed=0, resamples=10_000)
    assert found.mean == pytest.approx(0.16)
    assert (found.low, found.high) == pytest.approx((0.03, 0.29), abs=0.02)
    assert found == paired_bootstrap(a, b, seed=0, resamples=10_000)


def test_the_paired_interval_of_successes_is_a_score_interval():
    found = paired_bootstrap(*outcomes(), seed=0, resamples=10)
    assert (found.mean, found.low, found.high) == (0.08, *paired_difference(10, 2, 100))
    same = paired_bootstrap(np.ones(6), np.ones(6), seed=0, resamples=10)
    assert same.low == pytest.approx(-same.high) and same.low < -0.3, (
        "six episodes without a disagreement are no proof of equality"
    )


@pytest.mark.full
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("n", [6, 20, 50, 512])
def test_intervals_cover(n, rate):
    """At least 93 % on average of 4000 simulated evaluations: of a rate, of paired successes, of mean returns."""
    rng, count = np.random.default_rng(n), 4000
    hits = dict.fromkeys(("rate", "paired", "return", "paired return"), 0)
    for _ in range(count):
        a, b = rng.random(n) < rate, rng.random(n) < rate
        found = Rate.of(a)
        hits["rate"] += found.low <= rate <= found.high
        lost = rng.random(n) < 0.05
        pairs = paired_bootstrap(a & ~lost, a & ~(~lost & b & (rng.random(n) < 0.05)), 0, 1)
        truth = rate * (0.95 - (1.0 - 0.95 * rate * 0.05))
        hits["paired"] += pairs.low <= truth <= pairs.high
        returns = rng.normal(rate, 1.0, n)
        mean = MeanReturn.of(returns)
        hits["return"] += mean.low <= rate <= mean.high
        hits["paired return"] += n > 20 or covers(paired_bootstrap(returns, rng.normal(0.0, 1.0, n), 0, 200), rate)
    floor = {"rate": 0.93 if n > 6 or rate in (0.5, 1.0) else 0.92}
    assert {name: hit / count for name, hit in hits.items() if hit / count < floor.get(name, 0.93)} == {}


def covers(interval, truth: float) -> bool:
    return bool(interval.low <= truth <= interval.high)


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


@pytest.mark.parametrize(("r", "k"), [(0.5, 3), (1.0, 10)])
def test_fisher_z_refuses_what_has_no_interval(r, k):
    with pytest.raises(ValueError, match="no interval"):
        fisher_z(r, k)
