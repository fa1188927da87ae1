"""Curves and the worst case of perturbed episodes, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.task import Parameter
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.recipes.perturbation import PerturbedEpisodes, curves, worst_case

FRICTION = Parameter("friction", 1.0, 0.5, 2.0, "factor", "")
LATENCY = Parameter("latency", 0.0, 0.0, 3.0, "control steps", "", integer=True)
VARIED = (FRICTION, LATENCY)


def point(outcome, **values):
    return PerturbedEpisodes(values, np.array(outcome))


def test_a_curve_holds_the_points_that_differ_in_one_parameter():
    points = [
        point([True] * 4, friction=2.0),
        point([False] * 4, friction=0.5, latency=0.0),  # named, but nominal
        point([True, False] * 2, friction=1.0, latency=3.0),
        point([True] * 3 + [False]),
        point([False] * 4, friction=2.0, latency=3.0),  # belongs to no curve
    ]
    found = curves(points, VARIED)
    assert [(value, score.score) for value, score in found["friction"]] == [(0.5, 0.0), (1.0, 0.75), (2.0, 1.0)]
    assert [(value, score.score) for value, score in found["latency"]] == [(0.0, 0.75), (3.0, 0.5)]
    assert found["friction"][1][1] == Rate.of([True] * 3 + [False])
    assert curves(points[:1], VARIED) == {}


def test_the_worst_point_is_chosen_and_scored_by_halves():
    points = [
        point([True] * 8),
        point([False, False, False, True, True, True, False, True], latency=2.0),  # worst in the first half
        point([True, True, True, True] + [False] * 4, friction=0.5),
    ]
    worst = worst_case(points)
    assert worst.values == {"latency": 2.0} and worst.score == Rate.of([True, True, False, True])
    assert worst.mean == pytest.approx((1.0 + 0.5 + 0.5) / 3) and worst.points == 3


def test_points_that_are_as_bad_are_counted():
    bad = [point([False, False, True, False], friction=value) for value in (0.5, 2.0)]
    assert worst_case([point([True] * 4), *bad]).ties == 1 and worst_case([point([True] * 4), bad[0]]).ties == 0


def test_the_worst_of_many_equal_points_is_not_underestimated():
    rng = np.random.default_rng(0)
    lowest, held_out = [], []
    for _ in range(200):
        points = [point(rng.random(32) < 0.8, friction=float(i)) for i in range(25)]
        lowest.append(min(item.score.score for item in points))
        held_out.append(worst_case(points).score.score)
    assert np.mean(lowest) < 0.7 and abs(np.mean(held_out) - 0.8) < 5 * 0.1 / np.sqrt(200)


def test_returns_are_compared_where_there_is_no_success():
    points = [point([1.0, 2.0, 3.0, 5.0]), point([0.0, -1.0, 4.0, 6.0], friction=0.5)]
    assert curves(points, VARIED)["friction"][0][1] == MeanReturn.of([0.0, -1.0, 4.0, 6.0])
    assert worst_case(points).score == MeanReturn.of([4.0, 6.0])
