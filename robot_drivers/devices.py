"""What is plugged into this computer: serial ports, cameras and joysticks, for those who set a robot up."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError

_NAMES = ("port", "host", "address")  # by which drivers are told where their arm is
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


@contextmanager
def claimed(options: Mapping[str, Any]) -> Iterator[None]:
    """The arm's port or address that a driver's ``options`` name, for one program on this computer at a time.

    The system gives it back however the program ends.  Raises UserError while another has it: commands of two would
    reach one arm, and neither's supervisor would know where it was sent.
    """
    if not (named := _place(options)):
        yield
        return
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir(), f"vla-rl-arm-{digest}")
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)  # also another user's
    except FileNotFoundError:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise UserError(
            f"another program on this computer drives the arm at {named!r}, so this one was not started; end that one "
            "first."
        ) from error
    try:
        yield
    finally:
        os.close(file)


def _place(options: Mapping[str, Any]) -> str:
    """Where an arm is, or the one inside another, as in a dry run; a file by its own name, whatever leads to it."""
    named = next((str(options[name]) for name in _NAMES if name in options), "")
    if not named and isinstance(inner := options.get("options"), Mapping):
        return _place(inner)
    return os.path.realpath(named) if os.path.exists(named) else named


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
