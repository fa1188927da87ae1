"""The robot's file: written by setup, read strictly."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import Joint, RobotSpec
from robot_drivers.limits import Box, JointLimits, Limits
from robot_drivers.safety import Supervisor
from robot_drivers.so101 import SO101
from tests.robot_drivers.arms import LIMITS, two_joints
from vla_rl.contract.errors import ContractError, UserError

ARM = {"name": "robot_drivers.so101:SO101", "options": {"port": "/dev/null"}}


def test_a_file_comes_back_as_it_was(tmp_path):
    limits = Limits.of(RobotSpec("one", (Joint("a", -1, 1, 2, 20, 400),), 50.0)).to_json()
    config = RobotConfig(
        Part(**ARM),
        {"front": Part("m:C", {"index": 0})},
        Part("m:T"),
        limits,
        "robot_drivers.kinematics:so101",
        ("pick", "place"),
        12.5,
    )
    config.save(tmp_path / "robots" / "arm.json")
    assert RobotConfig.load(tmp_path / "robots" / "arm.json") == config
    with pytest.raises(UserError, match="not overwritten"):
        config.save(tmp_path / "robots" / "arm.json")
    assert config.chain() is not None
    least = RobotConfig.from_json({"driver": ARM})
    assert least == RobotConfig(Part(**ARM)) and isinstance(least.open(), SO101)
    assert least.limits_of(least.open()) == Limits.of(least.open().spec)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "the robot's file is []"),
        ({}, "lacks 'driver'"),
        ({"driver": ARM, "camera": {}}, "did you mean 'cameras'?"),
        ({"driver": {"options": {}}}, "driver lacks 'name'"),
        ({"driver": ARM | {"option": {}}}, "did you mean 'options'?"),
        ({"driver": ARM, "cameras": ["front"]}, "give {name: camera}"),
        ({"driver": ARM, "cameras": {"front": 0}}, "camera 'front' is 0"),
        ({"driver": ARM, "tasks": []}, "has no task"),
        ({"driver": ARM, "tasks": "pick"}, "give a list of instructions"),
        *[({"driver": ARM, "seconds": seconds}, "never begins") for seconds in (0, 1e9)],
        *[({"driver": ARM, "seconds": seconds}, "give a number") for seconds in ("20", float("nan"), float("inf"))],
        ({"driver": ARM, "cameras": {"../front": ARM}}, "cannot name a column"),
    ],
)
def test_what_is_unknown_or_missing_is_refused(value, says):
    with pytest.raises(UserError) as refused:
        RobotConfig.from_json(value)
    assert says in str(refused.value)


def limits_of(spoil):
    """What the supervisor gets from a file whose limits of "lift", or of all, are spoilt."""
    limits = LIMITS.to_json()
    limits["joints"][0] |= {name: value for name, value in spoil.items() if name not in limits}
    limits |= {name: value for name, value in spoil.items() if name in limits}
    config = RobotConfig.from_json(
        json.loads(json.dumps({"driver": {"name": "tests.robot_drivers.arms:ToyArm"}, "limits": limits}))
    )
    return config.limits_of(config.open())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            {"low": -114.6, "high": 114.6},
            "low of joint 'lift' is -114.6 in the limits, and the hardware of toy allows -2 (rad)",
        ),
        ({"low": -2.1}, "allows -2 (rad), so the arm is not moved; give -2 or a stricter one."),
        ({"high": 2.1}, "allows 2 (rad), so the arm is not moved; give 2 or a stricter one."),
        ({"high": 114.6}, "(are these degrees?)"),
        ({"velocity": 2.1, "fastest": 2.1}, "velocity of joint 'lift' is 2.1 in the limits"),
        ({"acceleration": 1146.0}, "allows 20 (rad/s²), so the arm is not moved (are these degrees?)"),
        ({"jerk": 401.0}, "allows 400 (rad/s³)"),
        ({"lead": 2.1}, "lead of joint 'lift' is 2.1"),
        ({"fastest": 2.1}, "fastest of joint 'lift' is 2.1"),
        ({"velocity": 1.9, "fastest": 1.8}, "could not follow"),
        ({"control_hz": 25.0}, "toy is commanded at 50 Hz"),
        ({"watchdog": 1e9}, "watchdog of the limits is 1000000000.0"),
        ({"max_age": 2.1}, "from 1e-06 to 2"),
        ({"deadman": "no"}, "give true or false"),
        ({"workspace": {"low": [-300, -300, 0], "high": [300, 300, 400]}}, "are these millimetres?"),
        ({"velocty": 1.0}, "did you mean 'velocity'"),
    ],
)
def test_limits_are_never_wider_than_the_hardware(spoil, says):
    assert limits_of({}) == LIMITS and limits_of({"high": 1.5, "velocity": 0.5}).joints[0].velocity == 0.5
    with pytest.raises(UserError) as refused:
        limits_of(spoil)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("joint", "says"),
    [
        ({"high": 114.6}, "are these degrees?"),
        ({"unit": "m", "high": 300.0}, "are these millimetres?"),
        ({"unit": "1", "high": 100.0}, "are these percent?"),
        ({"velocity": float("nan")}, "velocity of joint 'a' is nan"),
        ({"high": -1.0}, "which is nowhere"),
        ({"low": 10**400}, "low of joint 'a'"),
    ],
)
def test_a_driver_states_limits_that_an_arm_can_have(joint, says):
    good = dict(name="a", low=-1.0, high=1.0, velocity=1.0, acceleration=10.0, jerk=100.0)
    with pytest.raises(UserError) as refused:
        Joint(**{**good, **joint})
    assert says in str(refused.value)
    for hz in (0.0, 1e12, float("nan")):
        with pytest.raises(UserError, match="control_hz of arm"):
            RobotSpec("arm", (Joint(**good),), hz)


def test_a_file_that_cannot_be_read_says_how_to_get_one(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    for name in ("deep.json", "absent.json"):
        with pytest.raises(UserError, match="vla-rl robot setup"):
            RobotConfig.load(tmp_path / name)
    with pytest.raises(UserError, match=r"cannot be made of .* so it is not used; correct its options"):
        RobotConfig(Part("robot_drivers.so101:SO101", {"prot": "/dev/null"})).open()


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
def test_limits_survive_json(box):
    limits = two_joints(workspace=box, deadman=True, watchdog=0.4)
    assert Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


GOOD = dict(name="a", low=0.0, high=1.0, velocity=1.0, acceleration=1.0, jerk=1.0, lead=1.0, fastest=1.0)
UNBOUNDED = {"high": 0.0}, {"low": math.nan}, {"high": math.inf}, {"velocity": 0.0}, {"jerk": math.nan}, {"lead": True}
UNBOUNDED += ({"velocity": 1e300}, {"velocity": 5e-324}, {"low": -1e300, "high": 1e300})


@pytest.mark.parametrize(
    "make",
    [
        *(lambda spoil=spoil: JointLimits(**{**GOOD, **spoil}) for spoil in UNBOUNDED),
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
