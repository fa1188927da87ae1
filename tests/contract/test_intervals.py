"""Intervals against golden numbers (reference/algorithms.md 6) and against their definitions."""

import math

import pytest

from vla_rl.contract.intervals import Z95, difference, paired_difference, poisson_rate, student, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0, 0.27753),
        (10, 10, 0.72247, 1),
        (8, 10, 0.49016, 0.94332),
        (45, 50, 0.78640, 0.95652),
        (90, 100, 0.82563, 0.94477),
        (450, 500, 0.87058, 0.92332),
        (485, 500, 0.95110, 0.98174),
        (0, 0, 0, 1),
    ],
)
def test_wilson(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("n", [1, 3, 77, 128, 512])
def test_wilson_is_exact_where_nothing_or_everything_succeeds(n):
    assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0


@pytest.mark.parametrize("bad", [(-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(bad):
    with pytest.raises(ValueError, match="no proportion"):
        wilson(*bad)


@pytest.mark.parametrize(("count", "duration"), [(1, 2.0), (7, 0.5), (400, 60.0)])
def test_the_ends_of_a_rates_interval_are_z_deviations_from_what_was_counted(count, duration):
    low, high = poisson_rate(count, duration)
    for rate, sign in ((low, 1), (high, -1)):
        assert count - rate * duration == pytest.approx(sign * Z95 * math.sqrt(rate * duration))


def test_a_rate_without_events_or_without_time():
    assert poisson_rate(0, 3.0) == (0.0, pytest.approx(Z95**2 / 3.0))
    assert poisson_rate(0, 0.0) == (0.0, math.inf)
    with pytest.raises(ValueError, match="no rate"):
        poisson_rate(-1, 1.0)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_difference_is_newcombes(one, other, low, high):
    """Table II of Newcombe 1998, method 10."""
    assert difference(one, other) == pytest.approx((low, high), abs=5.1e-5)
    assert difference(other, one) == pytest.approx((-high, -low), abs=5.1e-5)


def test_without_episodes_a_difference_is_anything():
    assert difference((3, 5), (0, 0)) == difference((0, 0), (3, 5)) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (120, 1.97993)]
)
def test_student(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=1e-4)


def test_the_paired_difference_by_hand():
    """Without a disagreement, or with nothing else, it is Wilson's of that; it is antisymmetric and never a point."""
    assert paired_difference(0, 0, 6) == pytest.approx((-(Z95**2) / (6 + Z95**2), Z95**2 / (6 + Z95**2)))
    assert paired_difference(12, 2, 50) == pytest.approx((0.06111, 0.34471), abs=1e-4)
    low, high = paired_difference(2, 12, 50)
    assert (-high, -low) == pytest.approx(paired_difference(12, 2, 50))
    assert paired_difference(20, 0, 20)[1] == pytest.approx(1.0) and paired_difference(0, 0, 0) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="cannot be won alone"):
        paired_difference(4, 3, 6)
