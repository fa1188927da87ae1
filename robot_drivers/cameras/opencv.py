"""USB cameras, network streams and video files by OpenCV.

open_camera("robot_drivers.cameras.opencv:OpenCVCamera", {"index": 0, "width": 640, "height": 480, "fps": 30})
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from robot_drivers.cameras.camera import CameraError, CameraSpec, Frame
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed


class OpenCVCamera:
    """``cv2.VideoCapture`` as a source of frames.

    index               number of the camera, its device ("/dev/video0"), or the path or address of a video
    height, width, fps  what it is set to
    fourcc              how the camera sends its pixels ("MJPG" lets several share one USB bus); "" for its own way

    A picture is stamped when it has arrived, before it is decoded.
    """

    def __init__(
        self, index: int | str = 0, height: int = 480, width: int = 640, fps: float = 30.0, fourcc: str = ""
    ) -> None:
        if len(fourcc) not in (0, 4):
            raise UserError(f"fourcc={fourcc!r} has not four characters, so it names no format; try MJPG or YUYV.")
        self.spec = CameraSpec(height, width, fps)
        self._index, self._fourcc = index, fourcc
        self._capture: Any = None

    def open(self) -> None:
        cv2 = installed("cv2", "no camera can be read", "robot", "OpenCV")
        self._capture = cv2.VideoCapture(self._index)
        if not self._capture.isOpened():
            raise CameraError(f"OpenCV cannot open {self._index!r}")
        settings = [
            (cv2.CAP_PROP_FRAME_WIDTH, self.spec.width),
            (cv2.CAP_PROP_FRAME_HEIGHT, self.spec.height),
            (cv2.CAP_PROP_FPS, self.spec.fps),
            (cv2.CAP_PROP_BUFFERSIZE, 1),  # an old picture is of no use
        ]
        if self._fourcc:  # first: sizes and rates depend on it
            settings.insert(0, (cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*self._fourcc)))
        for setting, value in settings:
            self._capture.set(setting, value)  # what a device ignores shows in its pictures and in their rate

    def grab(self) -> Frame:
        arrived = self._capture.grab()
        captured = time.monotonic()
        decoded, image = self._capture.retrieve() if arrived else (False, None)
        if not decoded or image is None:
            raise CameraError(f"OpenCV got no picture from {self._index!r}")
        return Frame(np.ascontiguousarray(image[:, :, ::-1]), captured)  # OpenCV's are BGR

    def close(self) -> None:
        if self._capture is not None:
            self._capture.release()
            self._capture = None
