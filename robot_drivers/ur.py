"""Arms of Universal Robots over RTDE, by ur-rtde: joint targets as a stream of ``servoJ``.

open_driver("robot_drivers.ur:UR", {"host": "192.168.1.10", "model": "ur5e"})
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import installed

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
# °/s: the largest speeds of the joints, from the data sheets of Universal Robots.
_SPEEDS = {
    "ur3e": (180, 180, 180, 360, 360, 360),
    "ur5e": (180, 180, 180, 180, 180, 180),
    "ur10e": (120, 120, 180, 180, 180, 180),
    "ur16e": (120, 120, 180, 180, 180, 180),
}
_ACCELERATION, _JERK = 5.0, 100.0  # rad/s², rad/s³: our choice; none are published
_DECELERATION = 10.0  # of servoStop, its own default


class UR:
    """A UR arm, without what is mounted on it.

    host         its address
    model        "ur3e", "ur5e", "ur10e" or "ur16e"
    control_hz   rate at which it is commanded, at most 500
    watchdog_hz  the controller stops the arm when it hears from us less often
    lookahead    seconds, 0.03 to 0.2, and
    gain         100 to 2000: how smoothly and how closely ``servoJ`` follows
    """

    def __init__(
        self,
        host: str,
        model: str = "ur5e",
        control_hz: float = 125.0,
        watchdog_hz: float = 10.0,
        lookahead: float = 0.1,
        gain: float = 300.0,
    ) -> None:
        if model not in _SPEEDS:
            raise UserError(f"model={model!r} is no known arm, so its limits are not; {did_you_mean(model, _SPEEDS)}")
        if not (0.03 <= lookahead <= 0.2 and 100 <= gain <= 2000 and 0 < watchdog_hz < control_hz <= 500):
            raise UserError(
                f"lookahead={lookahead}, gain={gain}, watchdog_hz={watchdog_hz}, control_hz={control_hz} are not all "
                "in 0.03 to 0.2 s, 100 to 2000, below control_hz, and up to 500, so nothing is driven; correct them."
            )
        self._host, self._period = host, 1 / control_hz
        self._watchdog_hz, self._lookahead, self._gain = watchdog_hz, lookahead, gain
        turns = (2, 2, 1, 2, 2, 2)  # of π: the elbow cannot turn as far
        joints = tuple(
            Joint(name, -turn * math.pi, turn * math.pi, math.radians(speed), _ACCELERATION, _JERK)
            for name, turn, speed in zip(JOINTS, turns, _SPEEDS[model], strict=True)
        )
        self.spec = RobotSpec(model, joints, control_hz)
        self._control: Any = None
        self._receive: Any = None

    @property
    def is_connected(self) -> bool:
        return self._control is not None

    def connect(self) -> None:
        """Start ur-rtde's script on the controller, which then watches whether we are there; nothing moves."""
        rtde_control, rtde_receive = (
            installed(name, "no UR is reached", "ur", "ur-rtde") for name in ("rtde_control", "rtde_receive")
        )
        try:
            self._receive = rtde_receive.RTDEReceiveInterface(self._host)
            self._control = rtde_control.RTDEControlInterface(self._host)
            self._control.setWatchdog(self._watchdog_hz)
        except RuntimeError as error:
            self._forget()
            raise UserError(
                f"the UR at {self._host!r} cannot be controlled ({error}), so it is not used; switch it on, release "
                "its brakes, set it to remote control, and check the address."
            ) from error

    def observe(self) -> Measurement:
        """Positions (rad) and velocities (rad/s) of the six joints; raises DriverError for an arm that was stopped."""
        receive = self._reached()
        stopped = "an emergency stop" if receive.isEmergencyStopped() else ""
        stopped = stopped or ("a protective stop" if receive.isProtectiveStopped() else "")
        if stopped:
            raise DriverError(
                f"the UR at {self._host!r} is in {stopped}, so it does not follow; clear it at the pendant and connect "
                "again."
            )
        self._control.kickWatchdog()
        position, velocity = (np.array(read(), np.float64) for read in (receive.getActualQ, receive.getActualQd))
        if position.shape != (len(JOINTS),) or velocity.shape != (len(JOINTS),):
            raise DriverError(f"the UR at {self._host!r} sent {position.size} joints, so where it is is not known.")
        return Measurement(position, velocity, time.monotonic())

    def command(self, position: np.ndarray) -> np.ndarray:
        """Stream a target [6] to ``servoJ``, within the joints' limits; raises DriverError when it is refused."""
        sent = self.spec.within(position)
        self._reached()
        self._control.kickWatchdog()
        # Speed and acceleration are not used by servoJ, as its reference says.
        if not self._control.servoJ(sent.tolist(), 0.0, 0.0, self._period, self._lookahead, self._gain):
            raise DriverError(
                f"the UR at {self._host!r} refused a target, so it does not follow; look at its pendant, and connect "
                "again."
            )
        return sent

    def disconnect(self) -> None:
        """Slow down, end the script and the connections; the controller holds the arm."""
        if self._control is not None and self._control.isConnected():
            self._control.servoStop(_DECELERATION)
            self._control.stopScript()
        self._forget()

    def _reached(self) -> Any:
        if self._control is None or not (self._receive.isConnected() and self._control.isConnected()):
            raise DriverError(f"the UR at {self._host!r} is not connected, so it is not driven; connect it again.")
        return self._receive

    def _forget(self) -> None:
        for connection in (self._control, self._receive):
            if connection is not None:
                connection.disconnect()
        self._control = self._receive = None
