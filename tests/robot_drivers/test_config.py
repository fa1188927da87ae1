"""The robot's file: written by setup, read strictly."""

from __future__ import annotations

import json

import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import Joint, RobotSpec
from robot_drivers.limits import Limits
from robot_drivers.so101 import SO101
from tests.robot_drivers.toy_arm import LIMITS, ToyArm
from vla_rl.contract.errors import UserError

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
        *[({"driver": ARM, "seconds": seconds}, "never begins") for seconds in (0, 1e-9, float("nan"), float("inf"))],
        ({"driver": ARM, "seconds": "20"}, "give a number"),
        ({"driver": ARM, "cameras": {"../front": ARM}}, "cannot name a column"),
    ],
)
def test_what_is_unknown_or_missing_is_refused(value, says):
    with pytest.raises(UserError) as refused:
        RobotConfig.from_json(value)
    assert says in str(refused.value)


class Toy(ToyArm):
    """An arm of two joints, "lift" within 2 rad and 2 rad/s."""

    def __init__(self):
        super().__init__(lambda: 0.0)


def limits_of(spoil):
    """What the supervisor gets from a file whose limits of "lift", or of all, are spoilt."""
    limits = LIMITS.to_json()
    lift, all_ = (
        {name: value for name, value in spoil.items() if (name in limits) is whole} for whole in (False, True)
    )
    limits["joints"][0] |= lift
    config = RobotConfig.from_json(
        json.loads(json.dumps({"driver": {"name": f"{__name__}:Toy"}, "limits": limits | all_}))
    )
    return config.limits_of(config.open())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            {"low": -114.6, "high": 114.6},
            "low of joint 'lift' is -114.6 in the limits, and the hardware of toy allows -2 (rad)",
        ),
        ({"high": 114.6}, "(are these degrees?)"),
        ({"low": -2.1}, "allows -2 (rad), so the arm is not moved; give -2 or a stricter one."),
        ({"high": 2.1}, "allows 2 (rad), so the arm is not moved; give 2 or a stricter one."),
        ({"velocity": 2.1, "fastest": 2.1}, "velocity of joint 'lift' is 2.1 in the limits"),
        ({"acceleration": 1146.0}, "allows 20 (rad/s²), so the arm is not moved (are these degrees?)"),
        ({"jerk": 401.0}, "allows 400 (rad/s³)"),
        ({"lead": 2.1}, "lead of joint 'lift' is 2.1"),
        ({"fastest": 2.1}, "fastest of joint 'lift' is 2.1"),
        ({"velocity": 1.9, "fastest": 1.8}, "could not follow"),
        ({"control_hz": 25.0}, "toy is commanded at 50 Hz"),
        ({"control_hz": 1e12}, "from 1 to 1000"),
        ({"watchdog": 1e9}, "watchdog of the limits is 1000000000.0"),
        ({"max_age": 2.1}, "from 1e-06 to 2"),
        ({"deadman": "no"}, "give true or false"),
        ({"workspace": {"low": [-300, -300, 0], "high": [300, 300, 400]}}, "are these millimetres?"),
    ],
)
def test_limits_are_never_wider_than_what_the_driver_says_of_its_hardware(spoil, says):
    assert limits_of({}) == LIMITS and limits_of({"high": 1.5, "velocity": 0.5}).joints[0].velocity == 0.5
    with pytest.raises(UserError) as refused:
        limits_of(spoil)
    assert says in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("joint", "says"),
    [
        ({"high": 114.6}, "are these degrees?"),
        ({"unit": "m", "high": 300.0}, "are these millimetres?"),
        ({"unit": "1", "high": 100.0}, "are these percent?"),
        ({"velocity": float("nan")}, "velocity of joint 'a' is nan"),
        ({"jerk": 1e300}, "jerk of joint 'a' is 1e+300"),
        ({"high": -1.0}, "which is nowhere"),
        ({"low": 10**400}, "low of joint 'a'"),
    ],
)
def test_a_driver_states_limits_that_an_arm_can_have(joint, says):
    good = dict(name="a", low=-1.0, high=1.0, velocity=1.0, acceleration=10.0, jerk=100.0)
    assert Joint(**good)
    with pytest.raises(UserError) as refused:
        Joint(**{**good, **joint})
    assert says in str(refused.value)
    for hz in (0.0, 1e12, float("nan")):
        with pytest.raises(UserError, match="control_hz of arm"):
            RobotSpec("arm", (Joint(**good),), hz)


def test_a_file_that_cannot_be_read_says_how_to_get_one(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="vla-rl robot setup"):
        RobotConfig.load(tmp_path / "deep.json")
    with pytest.raises(UserError, match="so it is not used; correct its options"):
        RobotConfig(Part("robot_drivers.so101:SO101", {"prot": "/dev/null"})).open()
    with pytest.raises(UserError, match="vla-rl robot setup"):
        RobotConfig.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="cannot be made of"):
        Part("robot_drivers.so101:SO101", {"prot": "/dev/null"}).make()
