"""The policy's side of a robot: the control process as its owner sees it, and episodes on its arm.

``control.py`` runs in that process and waits for nothing that happens here: cameras, policy, recording.
"""

from __future__ import annotations

import contextlib
import math
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from robot_drivers.control import ControlConfig, Inbox
from robot_drivers.driver import Measurement
from robot_drivers.record import ControlStep, Decide, Decision, Query, Record
from vla_rl.contract.child import Child, ChildError, error_of
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError

PATIENCE = 2.0  # s; a decision that takes longer is not executed
_LOST = 5.0  # times the patience: a policy that hangs for so long is given up
_DELAYS = 10  # measured delays of which the longest is expected next
_START = 60.0  # seconds until the arm has answered
_ANSWER = 10.0  # seconds until a message is taken, or a record comes
_BEATS = 4  # signs of life while a request stays fresh
_WAIT = 0.1  # seconds between looks at whether all is over
_RECORDS = 4096  # that wait to be read

Observe = Callable[[Measurement, int], Observation]
"""A policy's observation of a measurement and the control steps of the episode so far: cameras are read here."""


@dataclass(frozen=True)
class ControlReport:
    """A control step, and how the process fares: all of it counted since it began.

    late      seconds after its deadline that the step began
    overruns  deadlines that were missed
    refused   chunks that came too late to count
    faults    calls that the driver failed
    dropped   messages to this process that nobody read for too long
    rearmed   times that a person has re-armed the arm
    keys      what the person pressed since the last control step (``HumanInput.keys``)
    attended  whether the teleoperator is heard
    stopped   why the arm is stopped until a person re-arms it, "" while it is not
    elsewhere which joint is measured so far from its command that a person has to say that it is there; "" for none
    """

    record: Record
    late: float
    overruns: int
    refused: int
    faults: int
    dropped: int
    rearmed: int
    keys: tuple[str, ...]
    attended: bool
    stopped: str
    elsewhere: str


class ControlProcess:
    """Starts ``python -m robot_drivers.control`` and speaks to it until :meth:`close`.

    A thread tells it again and again until when all was well that a decision depends on (``vital``): this process runs,
    and what :attr:`vital` returns.  Should this process hang or die, the arm comes to rest.
    """

    def __init__(self, config: ControlConfig) -> None:
        """Connects to the arm.  Raises UserError when that fails, with the reason of the driver."""
        self.vital: Callable[[], float] = time.monotonic
        self._child = Child([sys.executable, "-m", "robot_drivers.control"], name="runtime")
        self._inbox = Inbox(self._child.fileno(), "runtime")
        self._sending, self._closing = threading.Lock(), threading.Event()
        self._records: queue.Queue[ControlReport | UserError] = queue.Queue(_RECORDS)
        try:
            ready, *self._early = self._started(config)
        except BaseException:
            self._child.close()
            raise
        self.pid = self._child.pid
        self.first, self.resets = bool(ready["first"]), bool(ready["resets"])
        self.teleoperator_pid = int(ready["teleoperator"])
        self._beat = float(config.limits["max_age"]) / _BEATS
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._receive_all, self._beat_on)]
        for thread in self._threads:
            thread.start()

    def receive(self) -> ControlReport:
        """The next control step.

        Raises UserError when the process has ended, or refused what it was sent.
        """
        try:
            report = self._records.get(timeout=_ANSWER)
        except queue.Empty as error:
            raise UserError(
                f"the control process has sent nothing for {_ANSWER:g} s, so nothing is known of the arm; look at the "
                "robot, and at what this computer does beside."
            ) from error
        if isinstance(report, UserError):
            raise report
        return report

    def newest(self) -> ControlReport:
        """The newest control step: what nobody has looked at meanwhile is passed over.  Raises as :meth:`receive`."""
        newest = None
        while newest is None or not self._records.empty():
            newest = self.receive()
        return newest

    def decided(self, decision: Decision, observed: int) -> None:
        """Execute the chunk that was decided on the observation of step ``observed``."""
        chunk = np.asarray(decision.chunk, np.float64)
        self._send("chunk", chunk=chunk, policy_version=decision.policy_version, observed=observed)

    def reset(self, seed: int) -> None:
        """Prepare the scene of episode ``seed``, where :attr:`resets`."""
        self._send("reset", seed=seed)

    def begin(self, episode: int, time_limit: int) -> None:
        self._send("begin", episode=episode, time_limit=time_limit)

    def end(self, outcome: str) -> None:
        self._send("end", outcome=outcome)

    def stop(self, reason: str) -> None:
        """Bring the arm to rest until :meth:`rearm`; a request to software, no emergency stop."""
        self._send("stop", reason=reason)

    def rearm(self, there: np.ndarray | None = None) -> None:
        """A person allows the arm to move again, and says that it is ``there`` [D] where that is in doubt."""
        self._send("rearm", there=there)

    def close(self) -> None:
        """Bring the arm to rest, disconnect it and end the process; safe to call twice."""
        if self._closing.is_set():
            return
        with contextlib.suppress(ChildError):  # it has ended before
            self._send_all({"kind": "close"})
        self._closing.set()
        for thread in self._threads:
            thread.join(_ANSWER)  # the control process ends when the arm is at rest
        self._child.close()

    def _started(self, config: ControlConfig) -> list[Any]:
        """The first messages of the process: that it is ready, and perhaps more."""
        try:
            self._send_all(asdict(config))
            end = time.monotonic() + _START
            while not (messages := self._arrived()) and not self._inbox.gone and time.monotonic() < end:
                pass
            if not messages:
                self._child.receive(end)  # says what became of it
            if messages[0]["kind"] != "ready":
                raise error_of(messages[0])
            return messages
        except ChildError as error:
            raise self._lost(error) from error

    def _arrived(self) -> list[Any]:
        select.select([self._inbox], [], [], _WAIT)
        return self._inbox.poll()

    def _send(self, kind: str, **more: Any) -> None:
        try:
            self._send_all({"kind": kind, **more})
        except ChildError as error:
            raise self._lost(error) from error

    def _send_all(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self._child.send(message, time.monotonic() + _ANSWER)

    def _receive_all(self) -> None:
        waiting = deque(map(_understood, self._early))
        while not self._inbox.gone or waiting:
            waiting.extend(map(_understood, self._arrived()))
            while waiting:
                try:
                    self._records.put(waiting[0], timeout=_WAIT)
                except queue.Full:
                    if self._closing.is_set():  # nobody reads any more
                        return
                    break
                waiting.popleft()
        if not self._closing.is_set():
            try:
                self._child.receive(time.monotonic() + _ANSWER)
            except ChildError as error:
                self._records.put(self._lost(error))

    def _beat_on(self) -> None:
        while not self._closing.wait(self._beat):
            try:
                self._send_all({"kind": "alive", "stamp": self.vital()})
            except ChildError:
                return  # whoever waits for a record gets the error

    def _lost(self, error: ChildError) -> UserError:
        words = self._child.last_words()
        return UserError(
            f"the control process {error}, so the arm is where its last command left it; look at the arm before you "
            f"start again.{' Its last words: ' if words else ''}{words}"
        )


def _understood(message: Mapping[str, Any]) -> ControlReport | UserError:
    if message["kind"] == "record":
        given = {name: value for name, value in message.items() if name not in ("kind", "record", "keys")}
        return ControlReport(Record(**message["record"]), keys=tuple(message["keys"]), **given)
    return error_of(message) if message["kind"] == "failed" else UserError(message["error"])


class Runtime:
    """Plays episodes on the arm of a control process until :meth:`close`.

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
        self._delays: deque[int] = deque([1], _DELAYS)  # of the last chunks, in control steps
        self._inference = Inference(decide, control.decided)
        self._patience, self._pictured = patience, pictured
        self._asked, self._seen = -1, -1  # steps: of the last query, of the newest chunk that was executed
        control.vital = self._vital

    def close(self) -> None:
        """End the policy's thread; the control process is closed by whoever made it."""
        self._inference.close()
        self.control.vital = time.monotonic

    def episode(self, number: int, time_limit: int) -> Iterator[ControlStep]:
        """The control steps of episode ``number`` as they happen, until a person, the robot or the time limit ends it.

        Raises UserError when the control process is gone or refuses what it is sent and when the policy hangs, and what
        the policy raises.
        """
        self.control.begin(number, time_limit)
        while (report := self.control.receive()).record.episode != number:
            pass
        record, start = report.record, report.record.step
        try:
            while True:
                measured = Measurement(record.position, record.velocity, record.captured)
                obs = self._observe(measured, record.step - start)
                self._ask(record, obs, start)
                yield ControlStep(obs, record, report.stopped)
                if record.outcome:
                    return
                report = self.control.receive()
                record = report.record
        finally:
            if not record.outcome:
                self.control.end("interrupted")

    @property
    def delay(self) -> int:
        """How many control steps the next decision will probably take: as many as the longest of the last few."""
        return max(self._delays)

    def _ask(self, record: Record, obs: Observation, start: int) -> None:
        """Ask for a decision on ``obs`` if one is wanted and none is on its way; ``start`` is the episode's first step.

        Raises what the policy raised, and UserError when it hangs.
        """
        if record.chunk > self._seen:
            self._seen = record.chunk
            self._delays.append(record.step - record.chunk)
        busy = self._inference.busy
        if busy and record.heard >= start and time.monotonic() - self._inference.started > _LOST * self._patience:
            raise UserError(
                f"the policy has not decided for {_LOST * self._patience:g} s, so the arm is held and the episode has "
                "ended; look at the policy, or at its server and the network."
            )
        if not busy and record.asks and record.heard >= self._asked:
            self._asked = record.step
            consumed = None if record.consumed < 0 else record.consumed
            self._inference.ask(Query(obs, record.step, consumed, self.delay))

    def _vital(self) -> float:
        """Until when all was well."""
        return min(time.monotonic(), self._inference.started + self._patience, self._pictured())


class Inference:
    """Decides on one query after another, and hands every decision to ``deliver(decision, step)``."""

    def __init__(self, decide: Decide, deliver: Callable[[Decision, int], None]) -> None:
        self._decide, self._deliver = decide, deliver
        self._query: Query | None = None
        self.started = math.inf  # ``time.monotonic`` when the query that is being decided on came; infinity for none
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

    def ask(self, query: Query) -> None:
        with self._change:
            self._query, self.started = query, time.monotonic()
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
            self.started, self._query = math.inf, None
