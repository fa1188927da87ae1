"""Virtual time: events in order, outages, and how many gradient steps are due.  Exact: microseconds, as integers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import ContractError
from vla_rl.contract.limits import check_limits, check_positive

SECOND = 1_000_000  # microseconds
NEVER = 2**62
# Of events at the same moment: what arrives is learnt from before a publication, which robots and validations see.
ARRIVAL, PUBLICATION, ROBOT, VALIDATION = range(4)


def micros(seconds: float) -> int:
    """Microseconds."""
    return round(seconds * SECOND)


def steps_due(time: int, per_second: float) -> int:
    """How many events of a steady rate have happened by ``time``, microseconds; exact for rates in millionths."""
    return time * micros(per_second) // SECOND**2


class Timeline:
    """Runs events in the order of their time, then of their kind, then as they were added."""

    def __init__(self) -> None:
        self.now = 0  # microseconds
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, time: int, kind: int, event: Callable[[], None]) -> None:
        """``event()`` happens at ``time``; raises ContractError for a time that has passed."""
        if time < self.now:
            raise ContractError(
                f"an event was set for {time} us of virtual time and it is {self.now} us already, so it would never "
                "happen; set it for now or later."
            )
        heapq.heappush(self._events, (time, kind, self._added, event))
        self._added += 1

    def run(self, until: int) -> None:
        """Let happen what is due by ``until``, that moment included."""
        while self._events and self._events[0][0] <= until:
            self.now, _, _, event = heapq.heappop(self._events)
            event()
        self.now = until


@dataclass(frozen=True)
class OutageConfig:
    """How often something goes down, and for how long; both are exponentially distributed."""

    per_hour: float = 0.0  # of the time that it is up
    seconds: float = 60.0  # mean length

    def __post_init__(self) -> None:
        check_limits(self, per_hour=(0, math.inf))
        check_positive(self, "seconds")


class Outages:
    """The outages of one thing, drawn from ``generator`` in their order, so that they depend on nothing else."""

    def __init__(self, config: OutageConfig, generator: np.random.Generator) -> None:
        self.config, self._generator = config, generator
        self._begin, self._end = NEVER, NEVER
        self._draw(0)

    def next(self, time: int) -> tuple[int, int]:
        """Begin and end of the outage at ``time``, or of the first one after; ``time`` must not fall between calls."""
        while self._end <= time:
            self._draw(self._end)
        return self._begin, self._end

    def over(self, time: int) -> int:
        """``time``, or the end of the outage that there is then."""
        begin, end = self.next(time)
        return end if begin <= time else time

    def _draw(self, after: int) -> None:
        if not self.config.per_hour:
            return
        up = micros(self._generator.exponential(3600.0 / self.config.per_hour))
        self._begin = after + up
        self._end = self._begin + max(1, micros(self._generator.exponential(self.config.seconds)))
