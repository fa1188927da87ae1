"""A policy's decisions in a thread of its own, one at a time, while the arm goes on."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from robot_drivers.decisions import Decide, Decision, Query

_DELAYS = 10  # measured delays of which the longest is expected next


class Inference:
    """Decides on one query after another, and hands every decision to ``deliver(decision, step)``."""

    def __init__(self, decide: Decide, deliver: Callable[[Decision, int], None]) -> None:
        self._decide, self._deliver = decide, deliver
        self._query: Query | None = None
        self._started = math.inf
        self._failure: Exception | None = None
        self._change, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="policy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a query is being decided on; raises what the last one raised."""
        if self._failure is not None:
            raise self._failure
        return self._query is not None

    @property
    def started(self) -> float:
        """When the query that is being decided on came, in seconds of ``time.monotonic``; infinity for none."""
        return self._started

    def ask(self, query: Query) -> None:
        """Decide on ``query`` from now on."""
        with self._change:
            self._query, self._started = query, time.monotonic()
            self._change.notify()

    def close(self) -> None:
        """End the thread after what it is doing; a policy that hangs is left behind."""
        with self._change:
            self._closed = True
            self._change.notify()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._query is not None or self._closed)
                query = self._query
            if self._closed or query is None:
                return
            try:
                self._deliver(self._decide(query), query.step)
            except Exception as error:  # raised where the next record is looked at
                self._failure = error
                return
            self._started, self._query = math.inf, None


class Delays:
    """The delay of decisions in control steps, as it was measured: the longest of the last few is expected next."""

    def __init__(self) -> None:
        self._measured: deque[int] = deque([1], _DELAYS)

    def measured(self, steps: int) -> None:
        """A chunk arrived ``steps`` control steps after the observation that it was decided on."""
        self._measured.append(steps)

    @property
    def expected(self) -> int:
        return max(self._measured)
