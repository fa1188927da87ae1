"""What `vla-rl robot check` finds out about an arm, without moving it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from robot_drivers.cameras.camera import Camera, CameraError, CameraSpec, Frame
from robot_drivers.check import Clock, Finding, check_robot
from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from robot_drivers.limits import Limits
from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError

HZ, AT = 50.0, 100.0
NOW = [0.0]  # the virtual time of every test


@dataclass
class Arm:
    """Two joints that stand still; ``fault`` names what it does wrong."""

    fault: str = ""
    takes: float = 0.004  # s for a measurement
    commands: list[Any] = field(default_factory=list)
    spec = RobotSpec("desk", (Joint("a", -1, 1, 2, 20, 400), Joint("b", 0, 1, 2, 20, 400, unit="1")), HZ)
    is_connected = False
    measured = 0

    def connect(self) -> None:
        if self.fault == "unplugged":
            raise UserError("no arm answers at /dev/ttyACM0; plug it in.")

    def observe(self) -> Measurement:
        NOW[0] += self.takes
        self.measured += 1
        if self.fault == "silent" or (self.fault == "drops" and self.measured % 3 == 0):
            raise DriverError("servo 2 did not answer")
        position = {"shape": np.zeros(3), "nan": np.array([0.0, np.nan]), "outside": np.array([1.2, 0.5])}
        captured = NOW[0] - (0.03 * self.measured if self.fault == "backwards" else 0.0)
        return Measurement(position.get(self.fault, np.array([0.1, 0.5])), None, captured)

    def command(self, position: np.ndarray) -> np.ndarray:
        raise AssertionError("a check moved the arm")

    def disconnect(self) -> None:
        DISCONNECTED.append(self.fault)


class Uncalibrated(Arm):
    is_calibrated = False

    def calibrate(self, ask: Any) -> None:
        raise AssertionError("a check calibrated the arm")


class Eye:
    """Thirty pictures, ``late`` seconds ago the last, ``spacing`` seconds apart; then none, or an error."""

    spec = CameraSpec(4, 6, 30.0)

    def __init__(self, spacing: float = 1 / 30, late: float = 0.01, fails: str = "") -> None:
        self.stamps = [AT + 1 - late - spacing * i for i in range(30)]
        self.fails = fails

    def open(self) -> None:
        OVER.clear()
        if self.fails == "absent":
            raise UserError("no camera is there; plug it in.")

    def grab(self) -> Frame:
        if self.stamps:
            return Frame(np.zeros((4, 6, 3), np.uint8), self.stamps.pop())
        OVER.set()
        LEFT.wait(PATIENCE)
        raise CameraError("over")

    def close(self) -> None:
        OVER.set()


OVER, LEFT = threading.Event(), threading.Event()
DISCONNECTED: list[str] = []


def found(kind: str = "Arm", limits: Any = None, **options: Any) -> dict[str, Finding]:
    config = RobotConfig(Part(f"{__name__}:{kind}", options), limits=limits)

    def sleep(seconds: float) -> None:
        NOW[0] += seconds

    NOW[0] = AT
    return {finding.name: finding for finding in check_robot(config, 1.0, Clock(lambda: NOW[0], sleep))}


def test_an_arm_that_keeps_its_word_passes():
    findings = found()
    assert all(finding.good for finding in findings.values())
    assert findings["answers"].result == "50 of 50"
    assert findings["rate"].result.startswith("50.8 Hz of 50; a measurement takes 4.0 ms, 99 % at most 4.0 ms (20% ")
    assert "a up to 2/s" not in findings["limits"].result and "b up to 2/s" in findings["limits"].result


@pytest.mark.parametrize(
    ("fault", "line", "says"),
    [
        ("unplugged", "stopped here", "plug it in"),
        ("silent", "answers", "0 of 50; the first that was lost: servo 2 did not answer"),
        ("drops", "answers", "34 of 50"),
        ("shape", "positions", "shape (3,) where 2 angles are declared"),
        ("nan", "positions", "not finite"),
        ("outside", "within limits", "a at 1.2 (from -0.96 to 0.96)"),
        ("backwards", "time stamps", "backwards"),
    ],
)
def test_what_is_wrong_is_found(fault, line, says):
    findings = found(fault=fault)
    assert not findings[line].good and says in findings[line].result
    assert [finding.name for finding in findings.values() if not finding.good] == [line]


def test_an_arm_that_is_too_slow_for_its_rate_is_found():
    findings = found(takes=0.025)
    assert not findings["rate"].good and "(125% of a control step)" in findings["rate"].result


def test_measurements_that_are_too_far_apart_are_found():
    findings = found(takes=0.3)
    assert not findings["time stamps"].good  # the supervisor takes 0.2 s for stale


def test_an_arm_without_calibration_is_told_how_to_get_one():
    findings = found("Uncalibrated")
    assert not findings["calibration"].good and "vla-rl robot calibrate" in findings["calibration"].result
    assert "answers" not in findings  # its readings mean no angles


def test_limits_of_another_arm_are_found_before_anything_is_opened():
    other = Limits.of(RobotSpec("other", (Joint("a", -1, 1, 2, 20, 400),), HZ)).to_json()
    DISCONNECTED.clear()
    findings = found(limits=other)
    assert "joints ['a'], but desk has ['a', 'b']" in findings["stopped here"].result
    assert DISCONNECTED == []


def test_the_arm_is_left_also_when_nobody_reads_to_the_end():
    DISCONNECTED.clear()
    found()
    reading = check_robot(RobotConfig(Part(f"{__name__}:Arm", {"fault": "early"})), 1.0)
    while next(reading).name != "connection":
        pass
    reading.close()
    assert DISCONNECTED == ["", "early"]


@pytest.fixture
def leaving(monkeypatch):
    """The camera gives nothing more until it is disconnected."""
    LEFT.clear()
    disconnect = Camera.disconnect
    monkeypatch.setattr(Camera, "disconnect", lambda camera: (LEFT.set(), disconnect(camera)))


def seen(**options: Any) -> Finding:
    """What is found about a camera after one second of virtual time."""
    config = RobotConfig(Part(f"{__name__}:Arm", {"fault": "unplugged"}), {"front": Part(f"{__name__}:Eye", options)})

    def sleep(seconds: float) -> None:
        assert OVER.wait(PATIENCE)
        NOW[0] += seconds

    NOW[0] = AT
    return list(check_robot(config, 1.0, Clock(lambda: NOW[0], sleep)))[-1]


def test_a_camera_is_measured_also_when_the_arm_does_not_answer(leaving):
    finding = seen()
    assert finding == Finding("camera front", "6x4 at 30.0 of 30 pictures/s, the newest 10 ms old")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spacing": 1 / 20}, "20.0 of 30"),
        ({"late": 0.6}, "600 ms old"),
        ({"fails": "absent"}, "plug it in"),
    ],
    ids=["slow", "stale", "absent"],
)
def test_a_camera_that_does_not_keep_its_word_is_found(options, says, leaving):
    finding = seen(**options)
    assert not finding.good and says in finding.result
