"""Limits: from a spec, from JSON, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from robot_drivers.driver import Joint, RobotSpec
from robot_drivers.limits import Box, JointLimits, Limits
from robot_drivers.safety import Supervisor
from tests.robot_drivers.arms import two_joints
from vla_rl.contract.errors import ContractError


def test_limits_of_a_robot_leave_a_margin_at_each_end():
    spec = RobotSpec("arm", (Joint("pan", -1.0, 3.0, 2.0, 10.0, 100.0),), 50.0)
    (pan,) = Limits.of(spec, margin=0.1).joints
    assert (pan.low, pan.high) == pytest.approx((-0.6, 2.6))
    assert (pan.velocity, pan.acceleration, pan.jerk, pan.lead, pan.fastest) == (2.0, 10.0, 100.0, 0.5, 2.0)


def test_quarter_speed_slows_and_brakes_as_before():
    slow, full = two_joints().scaled(0.25).joints[0], two_joints().joints[0]
    assert slow == replace(full, velocity=full.velocity / 4)
    for speed in (0.0, 1.5, math.nan):
        with pytest.raises(ContractError, match="speed"):
            two_joints().scaled(speed)


@pytest.mark.parametrize("box", [None, Box((-1, -1, 0), (1, 1, 1))])
def test_json_both_ways(box):
    limits = two_joints(workspace=box, deadman=True, watchdog=0.4)
    assert Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


def test_json_with_a_wrong_name_is_refused():
    value = two_joints().to_json()
    with pytest.raises(ContractError, match="did you mean 'watchdog'"):
        Limits.from_json({**value, "watchdgo": 1.0})
    del value["joints"][0]["jerk"]
    with pytest.raises(ContractError, match="JointLimits lacks 'jerk'"):
        Limits.from_json(value)


GOOD = dict(name="a", low=0.0, high=1.0, velocity=1.0, acceleration=1.0, jerk=1.0, lead=1.0, fastest=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: JointLimits(**{**GOOD, "high": 0.0}),
        lambda: JointLimits(**{**GOOD, "low": math.nan}),
        lambda: JointLimits(**{**GOOD, "high": math.inf}),
        lambda: JointLimits(**{**GOOD, "velocity": 0.0}),
        lambda: JointLimits(**{**GOOD, "jerk": math.nan}),
        lambda: JointLimits(**{**GOOD, "lead": True}),
        lambda: JointLimits(**{**GOOD, "velocity": 1e300}),
        lambda: JointLimits(**{**GOOD, "velocity": 5e-324}),
        lambda: JointLimits(**{**GOOD, "low": -1e300, "high": 1e300}),
        lambda: Limits((), 50.0),
        lambda: Limits((JointLimits(**GOOD), JointLimits(**GOOD)), 50.0),
        lambda: two_joints(watchdog=0.0),
        lambda: two_joints(max_age=math.inf),
        lambda: Box((0, 0, 0), (1, 1, 0)),
        lambda: Box((0, 0), (1, 1)),
        lambda: Box((0, 0, math.nan), (1, 1, 1)),
        lambda: Limits.of(RobotSpec("arm", (), 50.0), margin=0.5),
        lambda: Supervisor(two_joints(workspace=Box((0, 0, 0), (1, 1, 1)))),
    ],
)
def test_what_bounds_nothing_is_refused_in_one_sentence(make):
    with pytest.raises(ContractError) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
