"""An arm of one's own: two joints that go where they are told, at once."""

import time

import numpy as np

from robot_drivers.driver import Joint, Measurement, RobotSpec


class OwnArm:
    """Replace what is marked by calls of the arm's own library, imported inside the methods."""

    def __init__(self, address: str, control_hz: float = 50.0) -> None:
        joints = tuple(Joint(name, -2.0, 2.0, velocity=3.0, acceleration=20.0, jerk=200.0) for name in ("pan", "lift"))
        self.spec = RobotSpec("own_arm", joints, control_hz)
        self.address, self.is_connected = address, False
        self._at = np.zeros(2)

    def connect(self) -> None:
        self.is_connected = True  # open the connection; nothing moves

    def observe(self) -> Measurement:
        return Measurement(self._at.copy(), None, time.monotonic())  # ask the arm; radians

    def command(self, position: np.ndarray) -> np.ndarray:
        self._at = np.clip(position, -2.0, 2.0)  # send the target
        return self._at.copy()  # what was sent

    def disconnect(self) -> None:
        self.is_connected = False  # leave the arm where it is
