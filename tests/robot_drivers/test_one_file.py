"""A new arm, camera or teleoperator is one file in a folder of one's own, known by its name: the how-to's own code."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from robot_drivers.cameras.camera import open_camera
from robot_drivers.driver import open_driver
from robot_drivers.limits import Limits
from tests.patience import PATIENCE, wait_until
from tests.test_layout import ROOT
from vla_rl.contract.child import Child


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The examples' folder, where this program and the ones that it starts look for modules."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'docs' / 'examples'}")


def test_an_arm_is_one_file():
    arm = open_driver("own_arm:OwnArm", {"address": "here"})
    assert not arm.is_connected and arm.spec.names == ("pan.pos", "lift.pos") and Limits.of(arm.spec)
    arm.connect()
    assert arm.command(np.array([9.0, 0.5])).tolist() == arm.observe().position.tolist() == [2.0, 0.5]
    arm.disconnect()


def test_a_camera_is_one_file():
    camera = open_camera("own_camera:OwnCamera", {"fps": 500.0}, "mine")
    camera.connect(PATIENCE)
    first = camera.read().image[0, 0, 0]
    wait_until(lambda: camera.read().image[0, 0, 0] != first)
    assert camera.read().image.shape == (24, 32, 3) and not camera.error
    camera.disconnect()


def test_a_teleoperator_is_one_file():
    child = Child([sys.executable, "-m", "robot_drivers.teleop.process"], name="control")
    child.send({"teleoperator": "own_teleoperator:OwnTeleoperator", "options": {"joints": 2}})
    read = child.receive()
    assert read["velocity"].tolist() == [0.2, 0.0] and read["engaged"]
    child.kill()
    child.close()
