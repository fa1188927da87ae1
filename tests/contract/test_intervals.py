"""Intervals against golden numbers (reference/algorithms.md 6) and against their definitions."""

import math

import numpy as np
import pytest

from vla_rl.contract.intervals import Z95, difference, paired_difference, poisson_rate, student, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2535, 0.3682),
        (15, 148, 0.0598, 0.1644),
        (0, 20, 0, 0.2005),
        (1, 29, 0.0018, 0.1963),
        (0, 0, 0, 1),
    ],
)
def test_wilson(successes, n, low, high):
    """Table I of Newcombe 1998, method 4."""
    assert wilson(successes, n) == pytest.approx((low, high), abs=5.1e-5)
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=5.1e-5)


@pytest.mark.parametrize("n", [1, 6, 10, 20, 50, 512])
def test_wilson_and_poisson_cover_95_percent_of_every_rate(n):
    """Exactly, by all counts; without the correction, 92.5 % of 20 episodes at .95 and 84 % of 10 at .98."""
    ends = np.array([wilson(k, n) for k in range(n + 1)])
    ways = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)])
    counts = np.arange(n + 1)
    for rate in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0 - 1e-12):
        weights = np.exp(ways + counts * math.log(rate) + (n - counts) * math.log1p(-rate))
        assert weights[(ends[:, 0] <= rate) & (rate <= ends[:, 1] + 1e-9)].sum() > 0.945, rate
    events = np.arange(4 * n + 20)
    rates = np.array([poisson_rate(int(k), 2.0) for k in events])
    log_ways = events * math.log(n) - n - np.array([math.lgamma(k + 1) for k in events])
    assert np.exp(log_ways)[(rates[:, 0] <= n / 2.0) & (n / 2.0 <= rates[:, 1])].sum() > 0.945


def test_wilson_is_exact_where_nothing_or_everything_succeeds():
    for n in (1, 3, 77, 128, 512):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0
    for bad in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="no proportion"):
            wilson(*bad)


@pytest.mark.parametrize(("count", "duration"), [(1, 2.0), (7, 0.5), (400, 60.0)])
def test_the_ends_of_a_rates_interval_are_z_deviations_away(count, duration):
    low, high = poisson_rate(count, duration)
    for rate, sign in ((low, 1), (high, -1)):
        assert count - rate * duration == pytest.approx(sign * (Z95 * math.sqrt(rate * duration) + 0.5))


def test_a_rate_without_events_or_without_time():
    assert poisson_rate(0, 3.0) == (0.0, pytest.approx(4.7893 / 3.0, abs=1e-4))
    assert poisson_rate(0, 0.0) == (0.0, math.inf)
    with pytest.raises(ValueError, match="no rate"):
        poisson_rate(-1, 1.0)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0428, 0.3422),
        ((9, 10), (3, 10), 0.1013, 0.8387),
        ((6, 7), (2, 7), -0.0290, 0.8423),
        ((5, 56), (0, 29), -0.0667, 0.2037),
        ((0, 10), (0, 20), -0.2005, 0.3445),
        ((0, 10), (0, 10), -0.3445, 0.3445),
        ((10, 10), (0, 20), 0.6014, 1.0),
        ((10, 10), (0, 10), 0.5128, 1.0),
    ],
)
def test_the_interval_of_a_difference_is_newcombes(one, other, low, high):
    """Table II of Newcombe 1998, method 11."""
    assert difference(one, other) == pytest.approx((low, high), abs=5.1e-5)
    assert difference(other, one) == pytest.approx((-high, -low), abs=5.1e-5)
    assert difference(one, (0, 0)) == difference((0, 0), one) == (-1.0, 1.0), "without episodes it is anything"


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (120, 1.97993)]
)
def test_student(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=1e-4)


def test_the_paired_difference_by_hand():
    """The example of Fagerland, Lydersen and Laake 2014 (21 children); without a disagreement it is no point."""
    assert paired_difference(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert paired_difference(0, 0, 6) == pytest.approx((-(Z95**2) / (6 + Z95**2), Z95**2 / (6 + Z95**2)))
    assert paired_difference(12, 2, 50) == pytest.approx((0.06111, 0.34471), abs=1e-4)
    low, high = paired_difference(2, 12, 50)
    assert (-high, -low) == pytest.approx(paired_difference(12, 2, 50))
    assert paired_difference(20, 0, 20)[1] == pytest.approx(1.0) and paired_difference(0, 0, 0) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="cannot be won alone"):
        paired_difference(4, 3, 6)
