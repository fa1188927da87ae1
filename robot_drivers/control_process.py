"""The control process as its owner sees it: records come, decisions and a sign of life go."""

from __future__ import annotations

import contextlib
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from robot_drivers.control import ControlConfig
from robot_drivers.decisions import Decision
from robot_drivers.mailbox import Inbox
from robot_drivers.record import Record
from vla_rl.contract.child import Child, ChildError, error_of
from vla_rl.contract.errors import UserError

_START = 60.0  # seconds until the arm has answered
_ANSWER = 10.0  # seconds until a message is taken, or a record comes
_BEATS = 4  # signs of life while a request stays fresh
_WAIT = 0.1  # seconds between looks at whether all is over
_RECORDS = 4096  # that wait to be read


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
    """Starts ``python -m robot_drivers.control`` and speaks to it; a context manager.

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
        self.first, self.resets, self.judged = (bool(ready[name]) for name in ("first", "resets", "judged"))
        self.teleoperator_pid = int(ready["teleoperator"])
        self._beat = float(config.limits["max_age"]) / _BEATS
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._receive_all, self._beat_on)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ControlProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Begin ``episode``, of at most ``time_limit`` control steps."""
        self._send("begin", episode=episode, time_limit=time_limit)

    def end(self, outcome: str) -> None:
        """End the episode."""
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
            self._send_all(config.to_json())
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
        names = ("late", "overruns", "refused", "faults", "dropped", "rearmed", "attended", "stopped", "elsewhere")
        given = {name: message[name] for name in names}
        return ControlReport(Record.from_message(message["record"]), keys=tuple(message["keys"]), **given)
    return error_of(message) if message["kind"] == "failed" else UserError(message["error"])
