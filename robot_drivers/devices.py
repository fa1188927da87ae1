"""What is plugged into this computer: serial ports, cameras and joysticks, for those who set a robot up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_USUAL = 30.0  # pictures per second of a camera that does not say
_INDICES = 4  # cameras that are tried where the system has no list of them


@dataclass(frozen=True)
class FoundCamera:
    """A camera that gives pictures: its ``index`` for OpenCV, and what it delivers if nobody sets anything."""

    index: int | str
    width: int
    height: int
    fps: float

    def __str__(self) -> str:
        return f"{self.index} ({self.width}x{self.height} at {self.fps:g}/s)"


def serial_ports() -> dict[str, str]:
    """{port: what is plugged in}; none where pyserial is not installed."""
    try:
        from serial.tools.list_ports import comports
    except ModuleNotFoundError:
        return {}
    return {port.device: port.description for port in comports() if port.vid is not None}


def joysticks() -> dict[str, str]:
    """{device: its name} of Linux's joysticks."""
    return {str(path): path.name for path in sorted(Path("/dev/input").glob("js*"))}


def cameras(candidates: Sequence[int | str] | None = None) -> list[FoundCamera]:
    """Those of ``candidates`` (OpenCV's indices or paths; None: whatever this computer lists) that give a picture.

    None where OpenCV is not installed.  A camera that somebody else uses gives no picture either.
    """
    try:
        import cv2
    except ImportError:
        return []
    found = []
    for index in _listed() if candidates is None else candidates:
        capture = cv2.VideoCapture(index)
        try:
            read, image = capture.read() if capture.isOpened() else (False, None)
            if read and image is not None:
                found.append(
                    FoundCamera(index, image.shape[1], image.shape[0], capture.get(cv2.CAP_PROP_FPS) or _USUAL)
                )
        finally:
            capture.release()
    return found


def _listed() -> list[int]:
    """Linux lists its cameras; elsewhere the first few indices are tried."""
    if not Path("/dev").is_dir() or not Path("/sys/class").is_dir():
        return list(range(_INDICES))
    names = (path.name.removeprefix("video") for path in Path("/dev").glob("video*"))
    return sorted(int(name) for name in names if name.isdecimal())
