"""What every sequence of commands must satisfy, computed from the commands and their times alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from robot_drivers.kinematics import Chain
from robot_drivers.limits import Limits

APART = 1e-3  # s; closer commands are looked at for their speed only: differences of higher order are rounding there
ROUNDING = 1e-3  # of each limit


def check(limits: Limits, times: Sequence[float], positions: Sequence[np.ndarray], inside: bool = True) -> None:
    """Asserts that commands [D] at ``times`` (not decreasing) keep every limit.

    The n-th divided difference of a function is its n-th derivative somewhere, over n!; so of commands at whatever
    times it is within the limit of that derivative, over n!, if they are samples of any function that keeps the
    limits.
    """
    commands = np.asarray(positions, np.float64)
    assert np.isfinite(commands).all()
    low, high = (np.array([getattr(joint, end) for joint in limits.joints]) for end in ("low", "high"))
    if inside:
        assert (commands >= low - 1e-9).all() and (commands <= high + 1e-9).all(), "a joint limit is violated"
    else:
        _only_inward(commands, low, high)
    fastest = np.array([joint.velocity for joint in limits.joints])
    gaps = np.diff(np.asarray(times, np.float64))[:, None]
    assert (abs(np.diff(commands, axis=0)) <= fastest * gaps * (1 + ROUNDING) + 1e-10).all(), "too fast"
    kept = [0]
    for index, time in enumerate(times):
        if time - times[kept[-1]] >= APART:
            kept.append(index)
    at, differences = np.asarray(times, np.float64)[kept], commands[kept]
    for order, name in enumerate(("velocity", "acceleration", "jerk"), start=1):
        if len(differences) < 2:
            return
        differences = np.diff(differences, axis=0) / (at[order:] - at[:-order])[:, None]
        bound = np.array([getattr(joint, name) for joint in limits.joints]) / math.factorial(order)
        assert (abs(differences) <= bound * (1 + ROUNDING)).all(), f"a {name} limit is violated"


def _only_inward(commands: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    outside = np.maximum(np.maximum(low - commands, commands - high), 0.0)
    assert (np.diff(outside, axis=0) <= 1e-9).all(), "a joint outside its limits moved farther out"


def outside(limits: Limits, chain: Chain, positions: Sequence[np.ndarray]) -> np.ndarray:
    """By how many metres the worst point of the arm, with its radius, is outside the box at each of ``positions``."""
    box = limits.workspace
    assert box is not None
    radii = [(point.name, point.radius) for point in chain.points if point.link >= 0]
    return np.array(
        [
            max(np.max([box.low - (at[name] - radius), at[name] + radius - box.high]) for name, radius in radii)
            for at in _places(limits, chain, positions)
        ]
    )


def check_workspace(limits: Limits, chain: Chain, positions: Sequence[np.ndarray]) -> None:
    """Asserts that every point of the arm, with its radius, is in the box and off the points it may not touch."""
    assert (outside(limits, chain, positions) <= 1e-9).all(), "a point is outside the workspace"
    check_apart(limits, chain, positions)


def check_apart(limits: Limits, chain: Chain, positions: Sequence[np.ndarray]) -> None:
    """Asserts that no point of the arm touches one that it may not."""
    radius = {point.name: point.radius for point in chain.points}
    for places in _places(limits, chain, positions):
        for one, other in chain.apart:
            distance = np.linalg.norm(places[one] - places[other])
            assert distance >= radius[one] + radius[other] - 1e-9, f"{one} and {other} touch"


def _places(limits: Limits, chain: Chain, positions: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    names = [joint.name for joint in limits.joints]
    for points in chain.positions(np.asarray(positions)[:, [names.index(joint) for joint in chain.joints]]):
        yield {point.name: place for point, place in zip(chain.points, points, strict=True)}


GENERATE = (Phase.explicit, Phase.generate)  # a failure is reported as it was found, within seconds
DETERMINISTIC = settings(derandomize=True, deadline=None, database=None, phases=GENERATE)


def holds_for(*strategies: Any, gate: int, full: int) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test of a property, of ``gate`` examples of the ``strategies``; of ``full`` ones where there is time."""

    def decorate(test: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [gate, pytest.param(full, marks=pytest.mark.full)])
        def run(examples: int) -> None:
            settings(DETERMINISTIC, max_examples=examples)(given(*strategies)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
