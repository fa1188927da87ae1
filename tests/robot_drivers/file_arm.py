"""A toy arm in another process: it writes every command, with its time, to a file; and a leader that never rests."""

from __future__ import annotations

import os
import time

import numpy as np

from robot_drivers.control import ControlConfig
from robot_drivers.executor import RecedingHorizon
from robot_drivers.record import HumanInput
from tests.robot_drivers.toy_arm import LIMITS, ToyArm

HERE = "tests.robot_drivers.file_arm"
SPEED = 0.1  # rad/s, of everybody here


class FileArm(ToyArm):
    """``path`` gets a line "seconds lift gripper" for each command and "end" when the arm is disconnected."""

    def __init__(self, path: str) -> None:
        super().__init__(time.monotonic)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def command(self, position: np.ndarray) -> np.ndarray:
        os.write(self._file, f"{time.monotonic()!r} {position[0]!s} {position[1]!s}\n".encode())
        return super().command(position)

    def disconnect(self) -> None:
        os.write(self._file, b"end\n")


class StuckArm(FileArm):
    """Takes every command and stays where it is."""

    def command(self, position: np.ndarray) -> np.ndarray:
        super().command(position)
        self.position = np.array([0.0, 0.5])
        return position


class RestlessLeader:
    """A person holds control all the time and moves."""

    def connect(self) -> None:
        self._begun = time.monotonic()

    def read(self) -> HumanInput:
        now = time.monotonic()
        return HumanInput(now, True, np.array([SPEED * (now - self._begun), 0.5]))

    def disconnect(self) -> None: ...


def config(path: str, leader: bool = False) -> ControlConfig:
    """A control process for the arm that writes to ``path``."""
    return ControlConfig(
        f"{HERE}:FileArm",
        LIMITS.to_json(),
        {"path": path},
        f"robot_drivers.executor:{RecedingHorizon.__name__}",
        {"steps": 10},
        teleoperator=f"{HERE}:RestlessLeader" if leader else "",
    )
