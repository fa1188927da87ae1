"""Control steps at their rate on the monotonic clock, without drift."""

from __future__ import annotations

import math
import os
import time


class Pace:
    """Absolute deadlines, one every ``dt`` seconds: a late step does not delay the ones after it.

    A step that begins a whole period late has missed the deadlines of others; they are left out and counted in
    ``overruns``, for commands that come in a burst would be no control.
    """

    def __init__(self, dt: float) -> None:
        self.overruns = 0
        self.late = 0.0  # seconds after its deadline that the last step began
        self._dt, self._deadline = dt, time.monotonic()

    def wait(self) -> None:
        """Until the next deadline."""
        self._deadline += self._dt
        left = self._deadline - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.late = time.monotonic() - self._deadline
        missed = math.floor(self.late / self._dt)
        if missed > 0:
            self.overruns += missed
            self._deadline += missed * self._dt


def take_priority() -> bool:
    """Run this thread before all ordinary ones, where the system allows it; whether it does.

    Processes that this one starts have ordinary priority.
    """
    if not hasattr(os, "sched_setscheduler"):  # not Linux
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True
