"""Intel RealSense cameras, their color pictures, by pyrealsense2.

open_camera("robot_drivers.cameras.realsense:RealSenseCamera", {"serial": "0123456789"})
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import numpy as np

from robot_drivers.cameras.camera import CameraError, CameraSpec, Frame
from vla_rl.contract.load import installed

_WAIT_MS = 1000  # until a picture that does not come is a failure


class RealSenseCamera:
    """A pipeline with the color stream as a source of frames.

    serial              the camera's serial number; "" for the only one
    height, width, fps  what it is set to, one of the camera's own combinations

    A picture is stamped when it has arrived.
    """

    def __init__(self, serial: str = "", height: int = 480, width: int = 640, fps: int = 30) -> None:
        self.spec = CameraSpec(height, width, float(fps))
        self._serial, self._fps, self._name = serial, fps, f"RealSense {serial or 'without a number'}"
        self._pipeline: Any = None

    def open(self) -> None:
        rs = installed("pyrealsense2", "no RealSense can be read", "realsense")
        config, pipeline = rs.config(), rs.pipeline()
        if self._serial:
            config.enable_device(self._serial)
        config.enable_stream(rs.stream.color, self.spec.width, self.spec.height, rs.format.rgb8, self._fps)
        try:
            pipeline.start(config)
        except RuntimeError as error:
            raise CameraError(f"{self._name} does not start: {error}") from error
        self._pipeline = pipeline

    def grab(self) -> Frame:
        try:
            frame = self._pipeline.wait_for_frames(_WAIT_MS).get_color_frame()
        except RuntimeError as error:
            raise CameraError(f"{self._name} is silent: {error}") from error
        captured = time.monotonic()
        if not frame:
            raise CameraError(f"{self._name} gave frames without color")
        return Frame(np.array(frame.get_data(), copy=True), captured)  # its memory is the camera's

    def close(self) -> None:
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            with suppress(RuntimeError):  # one that was unplugged has stopped already
                pipeline.stop()
