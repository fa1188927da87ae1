"""The robot's file: written by setup, read strictly."""

from __future__ import annotations

import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import Joint, RobotSpec
from robot_drivers.limits import Limits
from robot_drivers.so101 import SO101
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
        ({"driver": ARM, "seconds": 0}, "never begins"),
    ],
)
def test_what_is_unknown_or_missing_is_refused(value, says):
    with pytest.raises(UserError) as refused:
        RobotConfig.from_json(value)
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match="vla-rl robot setup"):
        RobotConfig.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="cannot be made of"):
        Part("robot_drivers.so101:SO101", {"prot": "/dev/null"}).make()
