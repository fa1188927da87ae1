"""Intervals of success rates and of rates of events: for evaluations, and for a fleet that compares two policies."""

from __future__ import annotations

import math
from functools import cache

Z95 = 1.959964


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927), corrected for continuity; [0, 1] without episodes.

    All rates ``p`` with at most ``z sqrt(n p (1 - p)) + 1/2`` successes between ``n p`` and what was counted (Newcombe
    1998, Statistics in Medicine 17:857, method 4).  At 95 % it holds 94.6 % or more of the time for every rate and
    number of episodes; without the correction 84 % at rates near 0 or 1, and 92.5 % for 95 % of 20 episodes.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes are no proportion; count both over the same episodes.")

    def end(count: float, sign: int) -> float:
        return (count + z**2 / 2 + sign * z * math.sqrt(count * (1.0 - count / n) + z**2 / 4)) / (n + z**2)

    return end(successes - 0.5, -1) if successes else 0.0, end(successes + 0.5, 1) if successes < n else 1.0


def difference(one: tuple[int, int], other: tuple[int, int], z: float = Z95) -> tuple[float, float]:
    """Interval of the rate of ``one`` minus that of ``other``, each (successes, episodes), independent of each other.

    Newcombe's hybrid score interval (1998, Statistics in Medicine 17:873, method 11), from both Wilson intervals;
    [-1, 1] without episodes.
    """
    (a_low, a_high), (b_low, b_high) = wilson(*one, z), wilson(*other, z)
    if not (one[1] and other[1]):
        return -1.0, 1.0
    a, b = one[0] / one[1], other[0] / other[1]
    return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)


def paired_difference(one: int, other: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Interval of the difference of two rates on the same ``n`` episodes, ``one`` of which the first won alone.

    Tango's score interval (Tango 1998, Statistics in Medicine 17:891): all differences ``d`` with ``one - other - n d``
    within ``z`` standard deviations, those of the likeliest rates with that difference; [-1, 1] without episodes.
    """
    if n == 0:
        return -1.0, 1.0
    if min(one, other) < 0 or one + other > n:
        raise ValueError(f"{one} and {other} of {n} pairs cannot be won alone; count all over the same episodes.")

    def deviations(d: float) -> float:
        b = (2 * n - one + other) * d - one - other
        rate = (math.sqrt(max(0.0, b * b + 8 * n * other * d * (1.0 - d))) - b) / (4 * n)  # of "other alone"
        variance = n * max(0.0, 2.0 * rate + d * (1.0 - d))
        gap = one - other - n * d
        return gap / math.sqrt(variance) if variance else math.copysign(math.inf, gap) if gap else 0.0

    def root(level: float, low: float, high: float) -> float:
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if deviations(middle) > level else (low, middle)
        return 0.5 * (low + high)

    mean = (one - other) / n
    return root(z, -1.0, mean), root(-z, mean, 1.0)


@cache
def student(freedom: int, level: float = 0.975) -> float:
    """The quantile at ``level`` of Student's t with ``freedom`` >= 1 degrees, by its closed form (A&S 26.7.3-4)."""
    low, high = 0.0, 0.5 * math.pi
    for _ in range(60):
        angle = 0.5 * (low + high)
        term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
        for k in range(1 + freedom % 2, freedom + 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * k / (k + 1)
        inside = math.sin(angle) * total if freedom % 2 == 0 else 2.0 / math.pi * (angle + math.sin(angle) * total)
        low, high = (angle, high) if inside < 2.0 * level - 1.0 else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def poisson_rate(count: int, duration: float, z: float = Z95) -> tuple[float, float]:
    """Score interval of ``count`` events in ``duration``, in events per unit of it, corrected for continuity: all rates

    ``r`` with at most ``z sqrt(r t) + 1/2`` events between ``r t`` and ``count``; [0, infinity] without any duration.
    """
    if count < 0 or duration < 0.0:
        raise ValueError(f"{count} events in {duration} are no rate; count both over the same time.")
    if duration == 0.0:
        return 0.0, math.inf

    def end(events: float, sign: int) -> float:
        return (events + z**2 / 2 + sign * z * math.sqrt(events + z**2 / 4)) / duration

    return end(count - 0.5, -1) if count else 0.0, end(count + 0.5, 1)
