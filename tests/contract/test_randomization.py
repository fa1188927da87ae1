"""The description of a randomisation: what it allows, JSON, and draws that depend on seed and name alone."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.task import Choice, Parameter, Randomization, Uniform, parameter_rows

FRICTION = Parameter("friction", 1.0, 0.5, 3.0, "factor", "of everything")
SHIFT = Parameter("shift", 0.0, -0.1, 0.1, "m", "to the right")
LATENCY = Parameter("latency", 0.0, 0.0, 4.0, "control steps", "delay", integer=True)
DECLARED = (FRICTION, SHIFT, LATENCY)
SEEDS = np.arange(2000)


def draw(seeds=SEEDS, **given):
    return Randomization.from_json(given).draw(DECLARED, seeds)


def test_what_is_not_described_is_nominal():
    assert draw(SEEDS[:3]).tolist() == [[1.0, 0.0, 0.0]] * 3
    assert draw(SEEDS[:0]).shape == (0, 3)
    assert draw(SEEDS[:2], shift=0.05).tolist() == [[1.0, 0.05, 0.0]] * 2


def test_a_uniform_parameter_fills_its_range_evenly():
    values = draw(friction={"low": 0.5, "high": 2.5})[:, 0]
    assert 0.5 <= values.min() < 0.51 and 2.49 < values.max() <= 2.5
    counts = np.histogram(values, 4, (0.5, 2.5))[0]
    assert (abs(counts - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75)).all()


@pytest.mark.parametrize("given", [{"low": 1, "high": 3}, {"values": [1, 2, 3]}])
def test_whole_numbers_and_choices_are_equally_likely(given):
    values, counts = np.unique(draw(latency=given)[:, 2], return_counts=True)
    assert values.tolist() == [1, 2, 3]
    assert (abs(counts - 2000 / 3) < 5 * math.sqrt(2000 * 2 / 9)).all()


def test_an_episode_keeps_its_values_whatever_else_is_varied():
    described = {"friction": {"low": 0.5, "high": 2.5}, "shift": {"low": -0.1, "high": 0.1}}
    both = draw(**described)
    assert np.array_equal(draw(friction=described["friction"])[:, 0], both[:, 0])
    assert np.array_equal(draw(SEEDS[::-1].copy(), **described), both[::-1])
    assert len(np.unique(both[:, 0])) == len(SEEDS)
    correlation = np.corrcoef(both[:, 0], both[:, 1])[0, 1]  # drawn by different generators
    assert abs(correlation) < 5 / math.sqrt(len(SEEDS))


def test_a_description_survives_json():
    described = Randomization({"friction": Uniform(0.5, 2.0), "latency": Choice((0.0, 2.0)), "shift": Choice((0.1,))})
    assert Randomization.from_json(json.loads(json.dumps(described.to_json()))) == described
    assert Randomization.from_json({"friction": Uniform(0.5, 2.0)}).distributions["friction"] == Uniform(0.5, 2.0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fricton": 1}, r"'lift' cannot vary 'fricton'.*did you mean 'friction'"),
        ({"friction": 3.1}, r"'friction' cannot be 3.1; give a number from 0.5 to 3 \(factor: of everything\)"),
        ({"friction": {"low": 0.4, "high": 1}}, r"'friction' cannot be 0.4"),
        ({"friction": {"low": 1, "high": 4}}, r"'friction' cannot be 4"),
        ({"friction": {"low": 2, "high": 1}}, r"no value between 2 and 1; give the lower bound first"),
        ({"latency": {"values": [0, 1.5]}}, r"'latency' cannot be 1.5; give a whole number from 0 to 4"),
        ({"latency": {"values": []}}, r"'latency' has no value to choose from"),
    ],
)
def test_what_an_environment_does_not_allow_is_refused(given, sentence):
    allowed = {"friction": {"low": 0.5, "high": 3.0}, "shift": -0.1, "latency": {"values": [0, 4]}}
    Randomization.from_json(allowed).check(DECLARED, "lift")
    with pytest.raises(UserError, match=sentence):
        Randomization.from_json(given).check(DECLARED, "lift")


def test_a_grid_spans_the_range_on_both_sides_of_the_nominal():
    assert FRICTION.grid(5) == (0.5, 0.75, 1.0, 2.0, 3.0)
    assert SHIFT.grid(3) == (-0.1, 0.0, 0.1)
    assert LATENCY.grid(5) == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert LATENCY.grid(9) == (0.0, 1.0, 2.0, 3.0, 4.0)  # whole numbers, each once
    turn = Parameter("turn", 0.0, -math.pi / 3, math.pi / 3, "rad", "")
    for value in turn.grid(7):
        turn.check(value)  # rounding leaves none outside


def test_rows_hold_what_is_given_and_nominal_values():
    rows = parameter_rows(DECLARED, {"shift": [0.1, 0.2]}, np.array([4, 7]))
    assert rows.tolist() == [[1.0, 0.1, 0.0], [1.0, 0.2, 0.0]]
    assert parameter_rows(DECLARED, None, np.array([1])).tolist() == [[1.0, 0.0, 0.0]]
    with pytest.raises(UserError, match=r"no parameter 'shiftt', so nothing was reset; did you mean 'shift'"):
        parameter_rows(DECLARED, {"shiftt": [0.1]}, np.array([1]))
    with pytest.raises(ContractError, match=r"'shift' has shape \(1,\) for 2 environments, so nothing was reset"):
        parameter_rows(DECLARED, {"shift": [0.1]}, np.array([1, 2]))
