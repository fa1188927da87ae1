"""The Franka Research 3 by franky: Ruckig plans motions to joint targets over libfranka.

open_driver("robot_drivers.franka:Franka", {"host": "172.16.0.2"})
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed

# rad, rad/s: the limits of the Franka Research 3 (Franka's "Robot and interface specifications").
_LOW = (-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159)
_HIGH = (2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159)
_SPEED = (2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26)
_ACCELERATION, _JERK = 10.0, 5000.0  # rad/s², rad/s³
_STOP = 2.0  # seconds that the arm has to come to rest
_ERRORS = (
    "CommandException",
    "ControlException",
    "InvalidOperationException",
    "NetworkException",
    "ProtocolException",
)


class Franka:
    """An FR3, without its hand.

    host                      its address
    relative_dynamics_factor  of the arm's largest velocity, acceleration and jerk, which the spec says too
    control_hz                rate at which it gets targets; the 1 kHz of its interface is franky's business
    """

    def __init__(self, host: str, relative_dynamics_factor: float = 0.05, control_hz: float = 50.0) -> None:
        if not 0 < relative_dynamics_factor <= 1:
            raise UserError(
                f"relative_dynamics_factor={relative_dynamics_factor} is no share of what the arm can do, so it is not "
                "driven; give more than 0, at most 1."
            )
        self._host, self._factor = host, relative_dynamics_factor
        bounds = zip(_LOW, _HIGH, _SPEED, strict=True)
        joints = tuple(
            Joint(f"joint{at}", low, high, self._factor * speed, self._factor * _ACCELERATION, self._factor * _JERK)
            for at, (low, high, speed) in enumerate(bounds, 1)
        )
        self.spec = RobotSpec("fr3", joints, control_hz)
        self._franky: Any = None
        self._robot: Any = None

    @property
    def is_connected(self) -> bool:
        return self._robot is not None

    def connect(self) -> None:
        """Reach the arm and clear the errors that it kept; nothing moves."""
        self._franky = franky = installed("franky", "no Franka is reached", "franka")
        with self._failing_as(UserError):
            robot = franky.Robot(self._host, relative_dynamics_factor=self._factor)
            recovered = not robot.has_errors or robot.recover_from_errors()
        if not recovered:
            raise UserError(self._why("its errors cannot be cleared"))
        self._robot = robot

    def observe(self) -> Measurement:
        """Positions (rad) and velocities (rad/s) of the seven joints; raises DriverError for an arm with errors."""
        robot = self._reached()
        with self._failing_as(DriverError):
            failed, state = robot.has_errors, robot.current_joint_state
        if failed:
            raise DriverError(self._why("it stopped with an error, see its Desk"))
        position, velocity = np.array(state.position, np.float64), np.array(state.velocity, np.float64)
        return Measurement(position, velocity, time.monotonic())

    def command(self, position: np.ndarray) -> np.ndarray:
        """Plan anew to a target [7] within the joints' limits, from the motion that is under way."""
        sent, robot = self.spec.within(position), self._reached()
        with self._failing_as(DriverError):
            robot.move(self._franky.JointMotion(sent.tolist()), asynchronous=True)
        return sent

    def disconnect(self) -> None:
        """Come to rest and let go of the arm, which holds itself; raises DriverError when it did not come to rest."""
        robot, self._robot = self._robot, None
        if robot is None:
            return
        with self._failing_as(DriverError):
            if robot.is_in_control:
                robot.move(self._franky.JointStopMotion(), asynchronous=True)
                if not robot.join_motion(_STOP):
                    robot.stop()

    def _reached(self) -> Any:
        if self._robot is None:
            raise DriverError(f"the Franka at {self._host!r} is not connected, so it is not driven; connect it first.")
        return self._robot

    @contextmanager
    def _failing_as(self, kind: type[Exception]) -> Iterator[None]:
        """What franky raises is a ``kind``."""
        try:
            yield
        except tuple(getattr(self._franky, name) for name in _ERRORS) as error:
            raise kind(self._why(str(error))) from error

    def _why(self, reason: str) -> str:
        return (
            f"the Franka at {self._host!r} does not follow ({reason}), so it is not driven; unlock its joints, "
            "activate FCI in its Desk, and connect again."
        )
