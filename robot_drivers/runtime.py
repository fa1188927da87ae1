"""The policy's side of a robot: the newest observation, a decision meanwhile, and what came of every control step.

The arm is controlled by another process (``control.py``), which waits for nothing that happens here: cameras, policy,
recording.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from robot_drivers.control_process import ControlProcess
from robot_drivers.decisions import Decide, Decision, Query
from robot_drivers.driver import Measurement
from robot_drivers.record import Record
from robot_drivers.steps import step_of
from vla_rl.contract.env import Observation, Step
from vla_rl.contract.errors import UserError

PATIENCE = 2.0  # s; a decision that takes longer is not executed
_LOST = 5.0  # times the patience: a policy that hangs for so long is given up

Observe = Callable[[Measurement, int], Observation]
"""A policy's observation of a measurement and the control steps of the episode so far: cameras are read here."""


@dataclass(frozen=True)
class Moment:
    """One control step: the observation before it, its labels, and what came of it (one action, with its frame)."""

    obs: Observation
    record: Record
    step: Step


class Runtime:
    """Plays episodes on the arm of a control process; a context manager.

    A decision is asked for when the way of executing chunks wants one, on the newest observation, and never two at a
    time.  A policy that takes longer than ``patience`` seconds is taken to hang, and the arm is held; five times that
    ends the episode.  An episode's first decision may take as long as it likes: the policy may have to be compiled, and
    the arm has nothing to execute.  ``pictured()`` is when the oldest of the cameras' newest pictures was captured
    (``time.monotonic``): where that is too old, the arm is held as well.
    """

    def __init__(
        self,
        control: ControlProcess,
        decide: Decide,
        observe: Observe,
        patience: float = PATIENCE,
        pictured: Callable[[], float] = time.monotonic,
    ) -> None:
        self.control, self._observe = control, observe
        self.delays = Delays()
        self.stopped = ""  # why the arm was stopped in the newest control step
        self._inference = Inference(decide, control.decided)
        self._patience, self._pictured = patience, pictured
        self._asked, self._seen = -1, -1  # steps: of the last query, of the newest chunk that was executed
        control.vital = self._vital

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the policy's thread; the control process is closed by whoever made it."""
        self._inference.close()
        self.control.vital = time.monotonic

    def episode(self, number: int, time_limit: int) -> Iterator[Moment]:
        """The control steps of episode ``number`` as they happen, until a person, the robot or the time limit ends it.

        Raises UserError when the control process is gone or refuses what it is sent and when the policy hangs, and what
        the policy raises.
        """
        self.control.begin(number, time_limit)
        record = next(record for record in self._records() if record.episode == number)
        start, obs = record.step, self._observe(measurement_of(record), 0)
        try:
            while True:
                self._ask(record, obs, start)
                following = next(self._records())
                after = self._observe(measurement_of(following), following.step - start)
                yield Moment(obs, record, step_of([record], [after], 1))
                if record.outcome:
                    return
                record, obs = following, after
        finally:
            if not record.outcome:
                self.control.end("interrupted")

    def _records(self) -> Iterator[Record]:
        while True:
            self.stopped = (report := self.control.receive()).stopped
            yield report.record

    def _ask(self, record: Record, obs: Observation, start: int) -> None:
        """Ask for a decision on ``obs`` if one is wanted and none is on its way; ``start`` is the episode's first step.

        Raises what the policy raised, and UserError when it hangs.
        """
        if record.chunk > self._seen:
            self._seen = record.chunk
            self.delays.measured(record.step - record.chunk)
        busy = self._inference.busy
        if busy and record.heard >= start and time.monotonic() - self._inference.started > _LOST * self._patience:
            raise UserError(
                f"the policy has not decided for {_LOST * self._patience:g} s, so the arm is held and the episode has "
                "ended; look at the policy, or at its server and the network."
            )
        if not busy and record.asks and record.heard >= self._asked:
            self._asked = record.step
            consumed = None if record.consumed < 0 else record.consumed
            self._inference.ask(Query(obs, record.step, consumed, self.delays.expected))

    def _vital(self) -> float:
        """Until when all was well."""
        return min(time.monotonic(), self._inference.started + self._patience, self._pictured())


def measurement_of(record: Record) -> Measurement:
    """What the arm measured in the control step of ``record``."""
    return Measurement(record.position, record.velocity, record.captured)


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
