"""What `vla-rl robot check` finds out about an arm, without moving it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_drivers import check
from robot_drivers.cameras.camera import Camera, CameraError, CameraSpec, Frame
from robot_drivers.check import (
    Finding,
    LatencyBudget,
    PolicyTiming,
    _device_answers,
    _joints,
    check_robot,
)
from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from robot_drivers.limits import Limits
from robot_drivers.record import HumanInput
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


def pass_by(seconds: float) -> None:
    NOW[0] += seconds


def checked(config: RobotConfig, sleep: Any = pass_by, policy: Any = None) -> dict[str, Finding]:
    """What is found in a second of virtual time."""
    NOW[0] = AT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "time", SimpleNamespace(monotonic=lambda: NOW[0], sleep=sleep))
        return {finding.name: finding for finding in check_robot(config, 1.0, policy)}


def found(kind: str = "Arm", limits: Any = None, **options: Any) -> dict[str, Finding]:
    findings = checked(RobotConfig(Part(f"{__name__}:{kind}", options), limits=limits))
    for finding in findings.values():
        assert finding.good or finding.cure.endswith("."), "what is wrong has a cure"
    return findings


def test_an_arm_that_keeps_its_word_passes():
    findings = found()
    assert all(finding.good for finding in findings.values())
    assert findings["answers"].result == "50 of 50"
    assert findings["rate"].result.startswith("50.8 Hz of 50; a measurement takes 4.0 ms, 99 % at most 4.0 ms (20% ")
    assert findings["latency"].result == "joints 4 ms; with --policy CHECKPOINT its decisions are measured too"
    assert "a up to 2/s" not in findings["limits"].result and "b up to 2/s" in findings["limits"].result


@pytest.mark.parametrize(
    ("fault", "line", "says"),
    [
        ("unplugged", "stopped here", "no arm answers at /dev/ttyACM0; plug it in."),
        ("silent", "answers", "0 of 50, the first that was lost: servo 2 did not answer"),
        ("drops", "answers", "34 of 50"),
        ("shape", "positions", "shape (3,) where 2 angles are declared"),
        ("nan", "positions", "not finite"),
        ("outside", "within limits", "a at 1.2 (from -0.96 to 0.96)"),
        ("backwards", "time stamps", "backwards"),
    ],
)
def test_what_is_wrong_is_found(fault, line, says):
    findings = found(fault=fault)
    assert not findings[line].good and says in str(findings[line])
    assert [finding.name for finding in findings.values() if not finding.good] == [line]


def test_an_arm_that_is_too_slow_is_found():
    findings = found(takes=0.025)
    assert not findings["rate"].good and "(125% of a control step)" in findings["rate"].result
    assert not found(takes=0.3)["time stamps"].good  # the supervisor takes 0.2 s for stale


def test_an_arm_without_calibration_is_told_how_to_get_one():
    findings = found("Uncalibrated")
    assert not findings["calibration"].good and "vla-rl robot calibrate" in findings["calibration"].cure
    assert "answers" not in findings  # its readings mean no angles


def test_limits_of_another_arm_are_found_before_it_is_opened():
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


@pytest.mark.parametrize(
    ("options", "good", "says"),
    [
        ({}, True, "6x4 at 30.0 of 30 pictures/s, the newest 10 ms old"),
        ({"spacing": 1 / 20}, False, "20.0 of 30"),
        ({"late": 0.6}, False, "600 ms old"),
        ({"fails": "absent"}, False, "plug it in"),
    ],
)
def test_a_camera_is_measured_also_when_the_arm_is_silent(options, good, says, monkeypatch):
    config = RobotConfig(Part(f"{__name__}:Arm", {"fault": "unplugged"}), {"front": Part(f"{__name__}:Eye", options)})
    disconnect = Camera.disconnect
    monkeypatch.setattr(Camera, "disconnect", lambda camera: (LEFT.set(), disconnect(camera)))
    LEFT.clear()  # the camera gives nothing more until it is disconnected

    def sleep(seconds: float) -> None:
        assert OVER.wait(PATIENCE)
        pass_by(seconds)

    finding = checked(config, sleep=sleep)["camera front"]
    assert finding.good is good and says in str(finding)


@dataclass
class Device:
    """A person's device with two axes, or one that is not there."""

    wrong: str = ""

    def connect(self) -> None:
        if self.wrong == "absent":
            raise UserError("the joystick is not there; plug it in.")

    def read(self) -> HumanInput:
        return HumanInput(time.monotonic(), velocity=np.zeros(2))

    def disconnect(self) -> None: ...


def test_a_teleoperator_is_read_in_its_process():
    configs = (
        RobotConfig(Part(f"{__name__}:Arm"), teleoperator=Part(f"{__name__}:Device", options))
        for options in ({}, {"wrong": "absent"})
    )
    findings, absent = ({one.name: one for one in check_robot(config, 0.1)} for config in configs)
    assert "inputs/s" in findings["teleoperator"].result
    assert findings["its joints"] == Finding("its joints", "2 velocities, as the arm has")
    assert not absent["teleoperator"].good and "plug it in" in str(absent["teleoperator"])


def test_a_teleoperator_that_does_not_fit_is_found():
    now, limits = time.monotonic(), Limits.of(Arm.spec)
    for said, says in (
        ([np.zeros(3)], "[3] numbers where the arm has 2 joints"),
        ([None], "neither positions nor velocities"),
        ([np.full(2, np.nan)], "not finite"),
    ):
        finding = _joints([HumanInput(now, velocity=velocity) for velocity in said], 2)
        assert not finding.good and says in str(finding)
    old = _device_answers([HumanInput(now), HumanInput(now + 0.01)], [1.0, 1.0], limits)
    assert not old.good and "are not followed" in str(old)


def test_ports_that_are_not_there_are_found_first(tmp_path):
    (tmp_path / "port").touch()
    for port, good in ((str(tmp_path / "port"), True), (str(tmp_path / "none"), False)):
        config = RobotConfig(Part("robot_drivers.so101:SO101", {"port": port}))
        finding = next(check_robot(config))
        assert finding.name == "port of the arm" and finding.good is good
    assert "is not there" in finding.result and "correct 'port'" in finding.cure


def latency(*took: float, horizon: int = 16) -> dict[str, Finding]:
    budget = LatencyBudget(HZ, pictures=0.03, measurement=0.004)
    return {finding.name: finding for finding in budget.findings(PolicyTiming(np.array(took), horizon))}


def test_the_latency_is_counted_in_control_steps():
    findings = latency(*[0.05] * 99, 0.09, horizon=16)
    assert all(finding.good for finding in findings.values())
    assert findings["latency"].result == (
        "pictures 30 ms + joints 4 ms + decision 50 ms (99 % at most 50 ms) = 84 ms, 5 control steps of 20 ms"
    )
    rarely_late = latency(*[0.05] * 90, *[0.09] * 10, horizon=16)["latency"].result
    assert rarely_late.endswith("50 ms (99 % at most 90 ms) = 124 ms, 7 control steps of 20 ms")
    assert findings["execution"].result.startswith("a chunk has 16 actions (0.32 s) and comes 3 steps late: receding")
    assert "--steps 3 to 13" in findings["execution"].result


def test_a_chunk_that_is_over_before_the_next_one_comes_is_found():
    assert latency(0.16, horizon=16)["execution"].good  # 8 steps: 16 actions just last
    findings = latency(0.17, horizon=16)
    assert "comes 9 steps late" in findings["execution"].result and "open_loop" in findings["execution"].cure
    assert findings["latency"].good and not latency(2.5, horizon=1000)["latency"].good


def test_a_policy_that_does_not_fit_is_a_finding():
    def unfit() -> PolicyTiming:
        raise UserError("it was trained for another arm; take its own.")

    *_, finding = checked(RobotConfig(Part(f"{__name__}:Arm")), policy=unfit).values()
    assert finding == Finding("policy", "it was trained for another arm", "take its own.")
