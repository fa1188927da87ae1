"""SIGTERM: a run prints how to resume it; in the middle of an iteration it finishes that one and saves first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM; it differs from Ctrl-C in its exit status only."""


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` meanwhile."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handler(stop):
        yield


@contextmanager
def patient_sigterm() -> Iterator[Callable[[], bool]]:
    """SIGTERM only makes the result return True meanwhile; whoever asks it saves and raises :class:`Terminated`."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    with _handler(note):
        yield asked.is_set


@contextmanager
def ignored_ctrl_c() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile: for what is at its end already and should be whole."""

    def ignore(number: int, frame: FrameType | None) -> None: ...

    with _handler(ignore, signal.SIGINT):
        yield


@contextmanager
def _handler(
    handler: Callable[[int, FrameType | None], None], number: signal.Signals = signal.SIGTERM
) -> Iterator[None]:
    """Python delivers signals to its main thread only; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
