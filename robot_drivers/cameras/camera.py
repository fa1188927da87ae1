"""A camera: a source of frames, read by a thread of its own, so that nobody waits for a picture.

A new camera is one class with the three blocking methods of :class:`FrameSource`; the rest is here.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from robot_drivers.driver import opened
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError

_FRAMES = 30  # that the rate is measured over
_LEAVE = 2.0  # seconds that a thread has to end


class CameraError(Exception):
    """A camera has no picture for us; the text says which one and why."""


@dataclass(frozen=True)
class CameraSpec:
    """What a camera is set to deliver, known before it is connected: pixels and frames per second."""

    height: int
    width: int
    fps: float

    def __post_init__(self) -> None:
        """Raises UserError for numbers that no camera has."""
        check_limits(self, height=(1, 16384), width=(1, 16384), fps=(0.1, 1000))


@dataclass(frozen=True)
class Frame:
    """One picture: RGB uint8 [h,w,3], and seconds of ``time.monotonic`` when it was captured."""

    image: np.ndarray
    captured: float


@runtime_checkable
class FrameSource(Protocol):
    """What differs between cameras.  All methods are called by one thread and may block."""

    @property
    def spec(self) -> CameraSpec:
        """Known before :meth:`open`."""

    def open(self) -> None:
        """Find the camera and set it to ``spec``; raises CameraError, or UserError where trying again is no use."""

    def grab(self) -> Frame:
        """Wait for the next picture; raises CameraError."""

    def close(self) -> None:
        """Free the camera; safe to call twice, and after a failure."""


class Camera:
    """The newest picture of ``source``, at once.

    name     of this camera, for errors
    max_age  seconds after which a picture counts as stale
    retry    seconds between two attempts to open a camera that failed

    A camera that fails is closed and opened again until it works; meanwhile the last picture ages.  ``error`` says what
    is wrong at the moment, "" if nothing is; ``failures`` counts how often it went wrong.
    """

    def __init__(self, source: FrameSource, name: str = "camera", max_age: float = 0.5, retry: float = 1.0) -> None:
        self.name, self.max_age = name, max_age
        self.error, self.failures = "", 0
        self._source, self._retry = source, retry
        self._newest: Frame | None = None
        self._stamps: deque[float] = deque(maxlen=_FRAMES)
        self._first, self._ending = threading.Event(), threading.Event()
        self._fatal: UserError | None = None
        self._thread: threading.Thread | None = None

    @property
    def spec(self) -> CameraSpec:
        return self._source.spec

    @property
    def is_connected(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def connect(self, patience: float = 10.0) -> None:
        """Start, and wait for the first picture; raises UserError when none comes within ``patience`` seconds."""
        self._first.clear()
        self._ending.clear()
        self._fatal = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()
        if self._first.wait(patience) and self._fatal is None:
            return
        self.disconnect()
        if self._fatal is not None:
            raise self._fatal
        raise UserError(
            f"the camera {self.name!r} gave no picture in {patience:g} s ({self.error or 'it is silent'}), so nothing "
            "is seen; look at its cable, at its name, and at who else uses it."
        )

    def read(self) -> Frame:
        """The newest picture, however old (see :meth:`stale`); raises CameraError before the first one."""
        if self._newest is None:
            raise CameraError(f"the camera {self.name!r} has given no picture yet; connect it first.")
        return self._newest

    def stale(self, now: float) -> bool:
        """Whether the newest picture is older than ``max_age`` at ``now`` (``time.monotonic``), or there is none."""
        return self._newest is None or not now - self._newest.captured <= self.max_age

    @property
    def fps(self) -> float:
        """The rate of the last frames, as captured; 0 before the second one."""
        stamps = tuple(self._stamps)
        taken = stamps[-1] - stamps[0] if len(stamps) > 1 else 0.0
        return (len(stamps) - 1) / taken if taken > 0 else 0.0

    def disconnect(self) -> None:
        """Stop and free the camera; one that hangs is left to itself.  Safe to call twice."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_LEAVE)
            self._thread = None

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    self._source.open()
                    self._follow()
                except CameraError as error:
                    self.error, self.failures = str(error), self.failures + 1
                    self._source.close()
                    self._ending.wait(self._retry)
        except UserError as error:
            self.error, self._fatal = str(error), error
            self._first.set()
        finally:
            self._source.close()

    def _follow(self) -> None:
        """Take pictures until one fails."""
        while not self._ending.is_set():
            frame = self._source.grab()
            spec, image = self._source.spec, frame.image
            if image.shape != (spec.height, spec.width, 3) or image.dtype != np.uint8:
                raise UserError(
                    f"the camera {self.name!r} delivers {image.dtype}{list(image.shape)} where uint8"
                    f"{[spec.height, spec.width, 3]} was declared, so it is not used; declare what it delivers."
                )
            if not math.isfinite(frame.captured):
                raise CameraError(
                    f"the camera {self.name!r} says that its picture is of {frame.captured}, so nobody knows how "
                    "old it is and it is not used; look at the clock of its driver."
                )
            self._newest, self.error = Frame(image.copy(), frame.captured), ""  # its memory is the driver's
            self._stamps.append(frame.captured)
            self._first.set()


def stamped(image: np.ndarray) -> Frame:
    """``image``, captured now: for sources that do not know better."""
    return Frame(image, time.monotonic())


def open_camera(name: str, options: Mapping[str, Any], label: str = "camera", max_age: float = 0.5) -> Camera:
    """The camera whose frames come from ``name`` ("module:Class") made of ``options``, not yet connected.

    Raises as ``driver.opened``.
    """
    return Camera(opened(name, options, FrameSource, "it gives no pictures"), label, max_age)  # type: ignore[type-abstract]
