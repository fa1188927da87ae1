"""A teleoperator of one's own: a button that moves the first joint while it is held."""

import time

import numpy as np

from robot_drivers.record import HumanInput


class OwnTeleoperator:
    """It is read a hundred times a second in a process of its own."""

    def __init__(self, joints: int = 6) -> None:
        self._joints, self.held = joints, False

    def connect(self) -> None:
        self.held = True  # open the device

    def read(self) -> HumanInput:
        velocity = np.zeros(self._joints)
        velocity[0] = 0.2 if self.held else 0.0  # rad/s
        return HumanInput(time.monotonic(), engaged=self.held, velocity=velocity)

    def disconnect(self) -> None:
        self.held = False
