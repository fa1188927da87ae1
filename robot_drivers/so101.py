"""The SO-101 arm (and SO-100) of LeRobot: six STS3215 servos on a serial bus.

    open_driver("robot_drivers.so101:SO101", {"port": "/dev/ttyACM0", "id": "my_arm"})

Joints are LeRobot's degrees in radians, the gripper is its 0 to 100 as a fraction (``robot_drivers.calibration``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from robot_drivers import feetech
from robot_drivers.calibration import RADIANS, Calibration, default_path
from robot_drivers.driver import Asks, Joint, Measurement, RobotSpec
from robot_drivers.feetech import Register
from robot_drivers.so101_servos import FULL_TURN, JOINTS, Servos
from vla_rl.contract.errors import ContractError

_FOLDERS = ("robots/so101_follower", "robots/so_follower")  # LeRobot's until 0.4.3, and since
# rad: the published joint limits of the arm (TheRobotStudio/SO-ARM100, Simulation/SO101/so101_new_calib.urdf).
_PUBLISHED = {
    "shoulder_pan": 1.91986,
    "shoulder_lift": 1.74533,
    "elbow_flex": 1.69,
    "wrist_flex": 1.65806,
    "wrist_roll": 2.74385,  # to the other side 2.84121
}
_SPEED = 4.71  # rad/s: 0.222 s for 60° without load at 7.4 V (Feetech's data sheet of the STS3215)
_ACCELERATION = 254 * 100 * RADIANS  # rad/s²: the largest that its memory can hold
_JERK = 10 * _ACCELERATION  # rad/s³: our choice; nothing is published
_OPENING = 1.91986  # rad between the gripper's published limits, for an arm without calibration
_GAINS: Mapping[Register, int] = {feetech.P_COEFFICIENT: 16, feetech.I_COEFFICIENT: 0, feetech.D_COEFFICIENT: 32}
# Half of its torque and current, so that a gripper that holds something does not burn out.
_GRIPPER: Mapping[Register, int] = {
    feetech.MAX_TORQUE_LIMIT: 500,
    feetech.PROTECTION_CURRENT: 250,
    feetech.OVERLOAD_TORQUE: 25,
}
_SETTINGS = {**dict.fromkeys(JOINTS, _GAINS), "gripper": {**_GAINS, **_GRIPPER}}


class SO101:
    """The follower.  Its torque comes on with the first :meth:`command`, at the position where the arm is.

    port                          the serial port ("/dev/ttyACM0")
    id                            LeRobot's name of this arm, which chooses the calibration file
    calibration                   another path of that file
    control_hz                    rate at which it is commanded
    timeout_ms                    time that the servos have for an answer; a request is repeated twice
    disable_torque_on_disconnect  whether the arm goes limp at the end, as LeRobot's does; otherwise it is held

    Raises UserError for a calibration file that is none.  Without one the arm can be connected and calibrated only.
    """

    def __init__(
        self,
        port: str,
        id: str = "so101",
        calibration: str = "",
        control_hz: float = 30.0,
        timeout_ms: float = 10.0,
        disable_torque_on_disconnect: bool = True,
    ) -> None:
        path = Path(calibration).expanduser() if calibration else default_path(_FOLDERS, id)
        self._servos = Servos(port, path, timeout_ms)
        self._control_hz, self._limp_at_the_end = control_hz, disable_torque_on_disconnect
        self._held = False

    @property
    def spec(self) -> RobotSpec:
        """Joints go as far as they were calibrated, or as published where they were not."""
        return RobotSpec("so101", joints(self._servos.calibration), self._control_hz, velocity_measured=True)

    @property
    def is_connected(self) -> bool:
        return self._servos.bus.is_open

    @property
    def is_calibrated(self) -> bool:
        """Whether the servos hold the calibration of the file; known after :meth:`connect`."""
        return self._servos.is_calibrated

    def connect(self) -> None:
        """Find the servos and write LeRobot's settings; nothing moves, and an arm that is limp stays so."""
        self._servos.open()
        try:
            self._servos.configure(_SETTINGS)
        except Exception:
            self._servos.bus.close()
            raise

    def observe(self) -> Measurement:
        """The joints now; ``extras["status"]`` uint8 [6] is not 0 for a gripper that is overloaded."""
        scale = self._servos.scale
        asked = time.monotonic()
        ticks, speed, status = self._servos.read()
        captured = (asked + time.monotonic()) / 2
        return Measurement(scale.position(ticks), scale.velocity(speed), captured, {"status": status})

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target float64 [6], rounded to ticks within the calibrated range; the first switches torque on."""
        if position.shape != (len(JOINTS),) or not np.isfinite(position).all():
            raise ContractError(
                f"{position!r} is no target of six joints, so nothing was sent; give finite {', '.join(JOINTS)}."
            )
        scale = self._servos.scale
        ticks = scale.ticks(position)
        if not self._held:
            self._servos.hold(self._servos.read()[0])
            self._held = True
        self._servos.send(ticks)
        return scale.position(ticks)

    def calibrate(self, ask: Asks) -> None:
        """LeRobot's routine, by hand; the arm is limp afterwards."""
        self._held = False
        self._servos.calibrate(ask)

    def disconnect(self) -> None:
        """Release torque (``disable_torque_on_disconnect``) and port; raises DriverError if a servo is silent."""
        if not self.is_connected:
            return
        try:
            if self._limp_at_the_end:
                self._servos.release()
        finally:
            self._held = False
            self._servos.bus.close()


def joints(calibration: Calibration | None) -> tuple[Joint, ...]:
    """The joints of an arm with this calibration, from shoulder to gripper."""
    found = []
    for name in JOINTS[:-1]:
        reach = _PUBLISHED[name]
        if calibration and name != FULL_TURN:  # whose range is not measured
            reach = (calibration[name].range_max - calibration[name].range_min) / 2 * RADIANS
        found.append(Joint(name, -reach, reach, _SPEED, _ACCELERATION, _JERK))
    opening = _OPENING
    if calibration:
        opening = (calibration["gripper"].range_max - calibration["gripper"].range_min) * RADIANS
    gripper = Joint("gripper", 0.0, 1.0, _SPEED / opening, _ACCELERATION / opening, _JERK / opening, unit="1")
    return (*found, gripper)
