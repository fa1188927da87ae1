"""UR and Franka arms: recorded calls of their vendors' libraries."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from robot_drivers.driver import DriverError, RobotDriver, open_driver
from robot_drivers.franka import Franka
from robot_drivers.ur import UR
from vla_rl.contract.errors import ContractError, UserError

READY = np.array([0.0, -1.5, 1.5, -1.5, -1.5, 0.0])  # rad


class RecordedUR:
    """ur-rtde 1.6.5 as its own docstrings say: lists in rad, booleans for success, RuntimeError without a robot."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.connected, self.accepts, self.emergency, self.protective = True, True, False, False
        self.joints = READY.tolist()

    def there(self, host: str, *options: object):
        self.calls.append((host, *options))
        if host != "ur":
            raise RuntimeError(f"Error: Could not connect to: {host} at 30004, verify the IP")
        return self

    def __getattr__(self, name: str):
        said = {
            "isConnected": self.connected,
            "isEmergencyStopped": self.emergency,
            "isProtectiveStopped": self.protective,
            "getActualQ": self.joints,
            "getActualQd": [0.1] * 6,
        }

        def called(*given: object) -> object:
            if name not in said:
                self.calls.append((name, *given))
            return said.get(name, self.accepts)

        return called


@pytest.fixture
def ur(monkeypatch):
    library = RecordedUR()
    monkeypatch.setitem(sys.modules, "rtde_control", SimpleNamespace(RTDEControlInterface=library.there))
    monkeypatch.setitem(sys.modules, "rtde_receive", SimpleNamespace(RTDEReceiveInterface=library.there))
    return library


def test_a_ur_is_streamed_to_and_watches_us(ur):
    arm = open_driver("robot_drivers.ur:UR", {"host": "ur", "control_hz": 100.0})
    assert isinstance(arm, RobotDriver) and not arm.is_connected
    arm.connect()
    assert ur.calls == [("ur",), ("ur",), ("setWatchdog", 10.0)]
    ur.calls.clear()
    found = arm.observe()
    assert found.position.tolist() == READY.tolist() and found.velocity.tolist() == [0.1] * 6
    assert ur.calls == [("kickWatchdog",)]
    ur.calls.clear()
    sent = arm.command(READY + np.array([0, 0, 3, 0, 0, 0]))
    assert sent.tolist() == [0.0, -1.5, math.pi, -1.5, -1.5, 0.0], "an elbow goes to half a turn"
    assert ur.calls == [("kickWatchdog",), ("servoJ", sent.tolist(), 0.0, 0.0, 0.01, 0.1, 300.0)]
    ur.calls.clear()
    arm.disconnect()
    arm.disconnect()
    assert ur.calls == [("servoStop", 10.0), ("stopScript",), ("disconnect",), ("disconnect",)]
    assert not arm.is_connected


def test_a_ur_that_is_stopped_lost_or_refuses_says_so(ur):
    arm = UR("ur")
    with pytest.raises(DriverError, match="is not connected"):
        arm.observe()
    arm.connect()
    for state, words in (("emergency", "an emergency stop"), ("protective", "a protective stop")):
        setattr(ur, state, True)
        with pytest.raises(DriverError, match=words):
            arm.observe()
        setattr(ur, state, False)
    ur.joints = [0.0] * 5
    with pytest.raises(DriverError, match="sent 5 joints"):
        arm.observe()
    ur.calls.clear()
    refuses(arm, "no target of the 6 joints of ur5e", np.zeros(7), READY + np.nan)
    assert not ur.calls
    ur.accepts = False
    with pytest.raises(DriverError, match="refused a target"):
        arm.command(READY)
    ur.connected = False
    with pytest.raises(DriverError, match="is not connected"):
        arm.command(READY)
    with pytest.raises(UserError, match="Could not connect to: nobody"):
        UR("nobody").connect()


def refuses(arm, words, *wrong):
    for target in wrong:
        with pytest.raises(ContractError, match=words):
            arm.command(target)


def test_the_specs_are_the_vendors_limits():
    speeds = [math.degrees(joint.velocity) for joint in UR("ur", "ur10e").spec.joints]
    assert speeds == pytest.approx([120, 120, 180, 180, 180, 180])
    joints = Franka("fr3", 0.1).spec.joints
    assert [joint.velocity for joint in joints] == pytest.approx([0.262, 0.262, 0.262, 0.262, 0.526, 0.418, 0.526])
    assert {(round(joint.acceleration, 9), round(joint.jerk, 9)) for joint in joints} == {(1.0, 500.0)}
    assert (joints[5].low, joints[3].high) == (0.5445, -0.1518)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: UR("ur", "ur5"), "did you mean"),
        (lambda: UR("ur", lookahead=0.3), "lookahead=0.3"),
        (lambda: UR("ur", control_hz=501), "control_hz=501"),
        (lambda: UR("ur", control_hz=20, watchdog_hz=20), "watchdog_hz=20"),
        (lambda: Franka("fr3", 1.5), "relative_dynamics_factor=1.5"),
    ],
)
def test_settings_that_an_arm_does_not_take_are_refused(made, words):
    with pytest.raises(UserError, match=words):
        made()


class NetworkError(Exception):
    """As franky's NetworkException, an exception of its own."""


class RecordedFranky:
    """franky 2.0.0 as its stubs and tutorial say (github.com/TimSchneider42/franky, doc/tutorial.md)."""

    CommandException = InvalidOperationException = NetworkException = ProtocolException = NetworkError
    ControlException = type("ControlException", (Exception,), {})

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.has_errors, self.recovers, self.is_in_control, self.rests = True, True, False, True
        self.current_joint_state = SimpleNamespace(position=np.arange(7.0), velocity=np.full(7, 0.5))
        self.fails: Exception | None = None

    def Robot(self, host: str, **options: float):
        self.calls.append(("Robot", host, options))
        if host != "fr3":
            raise NetworkError("libfranka: Connection timed out")
        return self

    def JointMotion(self, target: list[float]) -> tuple[str, list[float]]:
        return "JointMotion", target

    def JointStopMotion(self) -> str:
        return "JointStopMotion"

    def recover_from_errors(self) -> bool:
        self.calls.append(("recover_from_errors",))
        self.has_errors = not self.recovers
        return self.recovers

    def move(self, motion: object, asynchronous: bool = False) -> None:
        if self.fails:
            raise self.fails
        self.calls.append(("move", motion, asynchronous))
        self.is_in_control = True

    def join_motion(self, timeout: float) -> bool:
        self.calls.append(("join_motion", timeout))
        return self.rests

    def stop(self) -> None:
        self.calls.append(("stop",))


@pytest.fixture
def franky(monkeypatch):
    library = RecordedFranky()
    monkeypatch.setitem(sys.modules, "franky", library)
    return library


def test_a_franka_plans_to_the_newest_target(franky):
    arm = open_driver("robot_drivers.franka:Franka", {"host": "fr3", "relative_dynamics_factor": 0.1})
    assert isinstance(arm, RobotDriver) and len(arm.spec.joints) == 7
    arm.connect()
    assert franky.calls == [("Robot", "fr3", {"relative_dynamics_factor": 0.1}), ("recover_from_errors",)]
    found = arm.observe()
    assert found.position.tolist() == list(range(7)) and found.velocity.tolist() == [0.5] * 7
    franky.calls.clear()
    sent = arm.command(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert sent.tolist() == [0.0, 0.0, 0.0, -0.1518, 0.0, 0.5445, 0.0], "zero is outside of what two joints can do"
    assert franky.calls == [("move", ("JointMotion", sent.tolist()), True)]
    franky.calls.clear()
    arm.disconnect()
    arm.disconnect()
    assert franky.calls == [("move", "JointStopMotion", True), ("join_motion", 2.0)]


def test_a_franka_that_does_not_come_to_rest_is_stopped(franky):
    arm = Franka("fr3")
    arm.connect()
    arm.command(np.zeros(7))
    franky.rests = False
    arm.disconnect()
    assert franky.calls[-1] == ("stop",) and not arm.is_connected


def test_a_franka_with_errors_says_so(franky):
    arm = Franka("fr3")
    with pytest.raises(DriverError, match="is not connected"):
        arm.observe()
    with pytest.raises(UserError, match="Connection timed out"):
        Franka("nobody").connect()
    franky.recovers = False
    with pytest.raises(UserError, match="cannot be cleared"):
        arm.connect()
    franky.recovers = True
    arm.connect()
    franky.has_errors = True
    with pytest.raises(DriverError, match="stopped with an error"):
        arm.observe()
    refuses(arm, "no target of the 7 joints of fr3", np.zeros(6), np.full(7, np.inf))
    franky.fails = franky.ControlException("joint_velocity_violation")
    with pytest.raises(DriverError, match="joint_velocity_violation"):
        arm.command(np.zeros(7))
