"""LeRobot's calibration file: read and written as it is, and what it makes of ticks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.so101 import (
    GRIPPER,
    JOINTS,
    MotorCalibration,
    Scale,
    default_path,
    load_calibration,
    save_calibration,
)
from vla_rl.contract.errors import UserError

# Written by lerobot 0.4.4's own way of saving a calibration (draccus.dump, indent 4).
GOLDEN = Path(__file__).parent / "golden" / "so101.json"


def test_lerobots_file_is_read_and_written_byte_by_byte(tmp_path):
    calibration = load_calibration(GOLDEN, JOINTS)
    assert list(calibration) == list(JOINTS)
    assert calibration["shoulder_pan"] == MotorCalibration(1, 0, -1345, 741, 3484)
    save_calibration(tmp_path / "folder" / "so101.json", calibration)
    assert (tmp_path / "folder" / "so101.json").read_bytes() == GOLDEN.read_bytes()


def test_angles_are_lerobots_degrees_in_radians():
    """lerobot 0.4.4 sends these ticks for -45°, 30°, 90°, 0°, -170° and 25 %, and cuts fractions off; we round."""
    scale = Scale(load_calibration(GOLDEN, JOINTS), GRIPPER)
    position = np.array([*np.radians([-45.0, 30.0, 90.0, 0.0, -170.0]), 0.25])
    assert scale.ticks(position).tolist() == [1601, 2373, 2994, 2054, 114, 2400]
    lerobots = [1600, 2373, 2993, 2054, 113, 2400]
    assert np.abs(scale.ticks(position) - lerobots).max() <= 1
    assert scale.position(np.array([741, 837, 3081, 2054, 0, 2034])) == pytest.approx(
        [-1371.5 * math.tau / 4095, -1195 * math.tau / 4095, 1111 * math.tau / 4095, 0.0, -math.pi, 0.0], abs=1e-12
    )
    assert scale.velocity(np.array([4095.0, -4095.0, 0.0, 0.0, 0.0, 1465.0])) == pytest.approx(
        [math.tau, -math.tau, 0.0, 0.0, 0.0, 1.0]
    )


def test_every_tick_comes_back_and_targets_stay_in_the_calibrated_range():
    scale = Scale(load_calibration(GOLDEN, JOINTS), GRIPPER)
    low, high = np.array([741, 837, 859, 878, 0, 2034]), np.array([3484, 3227, 3081, 3230, 4095, 3499])
    for share in np.linspace(0.0, 1.0, 97):
        ticks = np.rint(low + share * (high - low)).astype(int)
        assert scale.ticks(scale.position(ticks)).tolist() == ticks.tolist()
    assert scale.ticks(np.full(6, -9.0)).tolist() == low.tolist()
    assert scale.ticks(np.full(6, 9.0)).tolist() == high.tolist()


def test_a_gripper_may_be_inverted_and_is_never_more_than_closed(tmp_path):
    calibration = load_calibration(GOLDEN, JOINTS)
    inverted = {**calibration, "gripper": MotorCalibration(6, 1, 1478, 2034, 3499)}
    for entries, opening in ((calibration, 0.0), (inverted, 1.0)):
        scale = Scale(entries, GRIPPER)
        assert scale.position(np.full(6, 2000))[GRIPPER] == opening
        assert scale.ticks(np.full(6, opening))[GRIPPER] == 2034
        assert scale.ticks(np.full(6, 1 - opening))[GRIPPER] == 3499


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("gripper"), "is not about shoulder_pan"),
        (lambda found: found["gripper"].update(range_max=2034), "'gripper' goes from 2034 to 2034"),
        (lambda found: found["gripper"].update(range_min=-1), "'gripper' goes from -1"),
        (lambda found: found["gripper"].update(range_max=4096), "'gripper' goes from 2034 to 4096"),
        (lambda found: found["gripper"].update(id=6.0), "'gripper' does not hold the whole numbers id"),
        (lambda found: found["gripper"].pop("id"), "'gripper' does not hold"),
    ],
)
def test_a_file_of_something_else_is_refused(change, words, tmp_path):
    found = json.loads(GOLDEN.read_text())
    change(found)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=words):
        load_calibration(path, JOINTS)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_calibration(path, JOINTS)


def test_it_lies_where_lerobot_keeps_it(tmp_path, monkeypatch):
    for variable in ("HF_HOME", "HF_LEROBOT_HOME", "HF_LEROBOT_CALIBRATION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = ("robots/so101_follower", "robots/so_follower")
    root = tmp_path / ".cache" / "huggingface" / "lerobot" / "calibration" / "robots"
    assert default_path(folders, "mine") == root / "so101_follower" / "mine.json"
    newer = root / "so_follower" / "mine.json"
    newer.parent.mkdir(parents=True)
    newer.write_text("{}")
    assert default_path(folders, "mine") == newer
    monkeypatch.setenv("HF_HOME", "/a")
    assert default_path(folders, "mine") == Path("/a/lerobot/calibration/robots/so101_follower/mine.json")
    monkeypatch.setenv("HF_LEROBOT_HOME", "/b")
    assert default_path(folders, "mine") == Path("/b/calibration/robots/so101_follower/mine.json")
    monkeypatch.setenv("HF_LEROBOT_CALIBRATION", "/c")
    assert default_path(folders, "mine") == Path("/c/robots/so101_follower/mine.json")
