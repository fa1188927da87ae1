"""Intervals of success rates and of rates of events: for evaluations, and for a fleet that compares two policies."""

from __future__ import annotations

import math

Z95 = 1.959964


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): centre ``(p + z^2/2n)/(1 + z^2/n)``; [0, 1] without episodes."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes are no proportion; count both over the same episodes.")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1.0 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1.0 - p) / n + z**2 / (4 * n**2)) / scale
    # Exact at the ends, where rounding would leave 1e-17 of a success.
    return (centre - half if successes else 0.0), (centre + half if successes < n else 1.0)


def difference(one: tuple[int, int], other: tuple[int, int], z: float = Z95) -> tuple[float, float]:
    """Interval of the rate of ``one`` minus that of ``other``, each (successes, episodes), independent of each other.

    Newcombe's hybrid score interval (Newcombe 1998, method 10), from both Wilson intervals; [-1, 1] without episodes.
    """
    (a_low, a_high), (b_low, b_high) = wilson(*one, z), wilson(*other, z)
    if not (one[1] and other[1]):
        return -1.0, 1.0
    a, b = one[0] / one[1], other[0] / other[1]
    return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)


def poisson_rate(count: int, duration: float, z: float = Z95) -> tuple[float, float]:
    """Score interval of ``count`` events in ``duration``, in events per unit of it: all rates ``r`` with ``z`` standard

    deviations ``sqrt(r t)`` between ``r t`` and ``count``; [0, infinity] without any duration.
    """
    if count < 0 or duration < 0.0:
        raise ValueError(f"{count} events in {duration} are no rate; count both over the same time.")
    if duration == 0.0:
        return 0.0, math.inf
    centre = count + z**2 / 2
    half = z * math.sqrt(count + z**2 / 4)
    return (centre - half if count else 0.0) / duration, (centre + half) / duration
