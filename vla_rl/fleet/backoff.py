"""How long to wait before another attempt: twice as long each time, up to a limit, spread at random."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from vla_rl.contract.config import check_limits


@dataclass(frozen=True)
class BackoffOptions:
    """Seconds: the first wait at most, and the longest."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises UserError for waits without meaning."""
        check_limits(self, first_s=(0.001, 3600.0), longest_s=(self.first_s, 86400.0))


class Backoff:
    """Waits between a half and the whole of ``first_s`` · 2^failures, so that robots do not come back all at once."""

    def __init__(self, options: BackoffOptions, draw: random.Random) -> None:
        self._options, self._draw, self._failures = options, draw, 0

    def next(self) -> float:
        """Seconds to wait now, after another failure."""
        limit = min(self._options.first_s * 2.0 ** min(self._failures, 60), self._options.longest_s)
        self._failures += 1
        return limit * self._draw.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self._failures = 0


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
