"""A camera of one's own: a picture whose brightness counts the frames."""

import time

import numpy as np

from robot_drivers.cameras.camera import CameraSpec, Frame, stamped


class OwnCamera:
    """Its methods are called in a thread, so they may block."""

    def __init__(self, fps: float = 100.0) -> None:
        self.spec = CameraSpec(height=24, width=32, fps=fps)
        self._frames = 0

    def open(self) -> None:
        self._frames = 0  # raise CameraError when the camera is not there: it is tried again

    def grab(self) -> Frame:
        time.sleep(1 / self.spec.fps)  # wait for the next picture; raise CameraError when none comes
        self._frames += 1
        return stamped(np.full((24, 32, 3), self._frames % 256, np.uint8))  # RGB

    def close(self) -> None:
        pass
