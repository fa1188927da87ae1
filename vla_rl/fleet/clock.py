"""Time, as an object that is handed in: tests and simulated fleets have another."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """``now``: seconds that only grow; ``wall_ns``: ns since 1970; ``wait``: whether ``event`` came in ``seconds``."""

    def now(self) -> float: ...

    def wall_ns(self) -> int: ...

    def wait(self, event: threading.Event, seconds: float) -> bool: ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)
