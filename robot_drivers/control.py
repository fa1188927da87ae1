"""``python -m robot_drivers.control``: the process that controls one arm at its rate, started by ``runtime.py``.

It holds the driver, the supervisor and the executor, and needs numpy and the vendor's library only.  It exchanges
messages with the process that started it (its owner: policy, cameras, recording) and with the teleoperator's process,
and waits for neither: what they say is polled, what they are told waits in a bounded buffer.  Either may hang or be
killed at any moment; the supervisor then brings the arm to rest.  When the owner is gone, the arm is stopped, the
driver disconnected, and this process ends.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from robot_drivers.driver import Resets, RobotDriver, claimed, open_driver
from robot_drivers.executor import Executor
from robot_drivers.limits import Limits
from robot_drivers.record import Decision, HumanInput, Record
from robot_drivers.safety import Supervisor
from vla_rl.contract.child import Child, claim_pipes, error_answer
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import load
from vla_rl.contract.wire import Pieces, framed, greeted, greeting


class Rate:
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


_AT_ONCE = 1 << 18  # bytes that are read from a peer in one call
_ROOM = 1 << 25  # bytes that wait for a peer: minutes of records
_LARGEST = 1 << 24  # bytes in one message of a peer


class Inbox:
    """What has arrived from a peer.  The first message is its greeting."""

    def __init__(self, end: int, name: str) -> None:
        """``end`` is the descriptor that is read, ``name`` that of this side."""
        os.set_blocking(end, False)
        self._end, self._name, self._greeted = end, name, False
        self._pieces = Pieces(_LARGEST)
        self.gone = ""  # why nothing comes any more

    def fileno(self) -> int:
        """The descriptor, for those who wait."""
        return self._end

    def poll(self) -> list[Any]:
        """The messages that are there, in their order; none for ever once the peer is gone or speaks nonsense."""
        if self.gone:
            return []
        try:
            if not (piece := os.read(self._end, _AT_ONCE)):
                raise EOFError("it has ended")
            messages = self._pieces.add(piece)
            if messages and not self._greeted:
                greeted(messages.pop(0), self._name)
                self._greeted = True
            return messages
        except BlockingIOError:
            return []
        except (OSError, EOFError, ContractError) as error:
            self.gone = str(error)
            return []


class Outbox:
    """What waits to be read by a peer.  When it hangs for long, the oldest whole messages are dropped and counted."""

    def __init__(self, end: int, name: str, room: int = _ROOM) -> None:
        """``end`` is the descriptor that is written, ``name`` that of this side, ``room`` how many bytes may wait."""
        os.set_blocking(end, False)
        self._end, self._room = end, room
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._partial = b""  # the rest of a message of which the peer has a part
        self.dropped = 0
        self.gone = False
        self.put(greeting(name))

    @property
    def waiting(self) -> bool:
        """Whether the peer has not got everything."""
        return bool(self._partial or self._waiting)

    def put(self, message: Any) -> None:
        """Send ``message`` when the peer has room for it."""
        data = framed(message)
        self._waiting.append(data)
        self._bytes += len(data)
        while self._bytes > self._room or (self.gone and self._waiting):
            self._bytes -= len(self._waiting.popleft())
            self.dropped += 1

    def flush(self) -> None:
        """Pass on what the peer has room for."""
        while not self.gone and self.waiting:
            if not self._partial:
                self._partial = self._waiting.popleft()
                self._bytes -= len(self._partial)
            written = 0
            with contextlib.suppress(BlockingIOError):
                try:
                    written = os.write(self._end, self._partial)
                except BrokenPipeError:
                    self.gone = True
            if not written:
                return
            self._partial = self._partial[written:]


_LAST = 3.0  # seconds that the arm has to come to rest at the end
_AT_REST = 10  # control steps without a change


@dataclass(frozen=True)
class ControlConfig:
    """What the control process is made of: JSON values, so that any process can start it.

    driver       "module:Class" of a RobotDriver and its options
    limits       ``Limits.to_json``
    chunks       "module:Class" of a way to execute chunks (``executor.py``) and its options
    kinematics   "module:function" that makes the arm's chain, for a workspace; "" for none
    teleoperator "module:Class" of a Teleoperator and its options, in a process of its own; "" for none.  The policy
                 moves the arm only while that process is heard
    """

    driver: str
    limits: Mapping[str, Any]
    driver_options: Mapping[str, Any] = field(default_factory=dict)
    chunks: str = "robot_drivers.executor:OpenLoop"
    chunks_options: Mapping[str, Any] = field(default_factory=dict)
    kinematics: str = ""
    teleoperator: str = ""
    teleoperator_options: Mapping[str, Any] = field(default_factory=dict)


class Control:
    """One arm, one owner and perhaps a teleoperator, step by step."""

    def __init__(
        self,
        driver: RobotDriver,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        teleoperator: Inbox | None = None,
    ) -> None:
        self.done = False
        self._driver, self._executor = driver, executor
        self._inbox, self._outbox, self._teleoperator = inbox, outbox, teleoperator
        self._rate = Rate(1 / driver.spec.control_hz)
        self._ends_at = np.inf  # when the arm has had its time to come to rest
        self._still = 0  # control steps
        self._keys: list[str] = []  # that the person pressed since the last control step
        self._alone = False  # the owner knows that the teleoperator is gone
        self._handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "chunk": self._chunk,
            "alive": lambda message: executor.alive(float(message["stamp"]), time.monotonic()),
            "reset": lambda message: executor.reset(int(message["seed"])),
            "begin": lambda message: executor.begin(int(message["episode"]), int(message["time_limit"])),
            "end": lambda message: executor.end(str(message["outcome"])),
            "stop": lambda message: executor.stop(str(message["reason"])),
            "rearm": lambda message: executor.rearm(time.monotonic(), message["there"]),
            "close": lambda message: self.finish("the run is over"),
        }

    def run(self) -> None:
        """Control steps at their rate until the owner has closed and the arm is at rest."""
        while not self.done:
            self._rate.wait()
            self.step()

    def step(self) -> None:
        """Listen, measure, command, tell."""
        self._listen()
        self._executor.measure(time.monotonic())
        record = self._executor.act(time.monotonic())
        sent = {"record": asdict(record), "late": self._rate.late, "overruns": self._rate.overruns}
        counts = {name: getattr(self._executor, name) for name in ("refused", "faults", "rearmed")}
        stopped, elsewhere = self._executor.supervisor.stopped, self._executor.supervisor.elsewhere
        person = {"keys": self._keys, "attended": self._executor.attended(time.monotonic())}
        self._tell("record", **sent, **counts, **person, stopped=stopped, elsewhere=elsewhere)
        self._keys = []
        self._rest(record)

    def finish(self, reason: str) -> None:
        """Bring the arm to rest and end."""
        if self._ends_at == np.inf:
            self._ends_at = time.monotonic() + _LAST
            self._executor.stop(reason)

    def _listen(self) -> None:
        for message in self._inbox.poll():
            self._understand("the owner", lambda told: self._handlers[told["kind"]](told), message)
        if self._inbox.gone:
            self.finish(f"its owner is gone: {self._inbox.gone}")
        for message in self._teleoperator.poll() if self._teleoperator else []:
            self._understand("the teleoperator", self._person, message)
        if self._teleoperator and self._teleoperator.gone and not self._alone:
            self._alone = True
            self._tell(
                "error",
                error=f"The teleoperator is gone ({self._teleoperator.gone}), so nobody can take over and the arm is "
                "held; look at it and begin again.",
            )

    def _understand(self, who: str, act: Callable[[Any], None], message: Any) -> None:
        """Do what ``message`` asks for; one that cannot be understood changes nothing, and the owner is told."""
        try:
            act(message)
        except UserError as error:
            self._tell("error", error=str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
            self._tell(
                "error",
                error=f"A message of {who} cannot be understood ({last}), so nothing came of it; "
                "use the same vla-rl everywhere.",
            )

    def _person(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            raise UserError(f"{message['failed']} Nobody can take over, so the arm is held.")
        read = human_input(message)
        self._executor.human(read, time.monotonic())
        self._keys += read.keys

    def _chunk(self, message: Mapping[str, Any]) -> None:
        decision = Decision(np.asarray(message["chunk"]), int(message["policy_version"]))
        self._executor.decided(decision, int(message["observed"]))

    def _tell(self, kind: str, **more: Any) -> None:
        self._outbox.put({"kind": kind, "dropped": self._outbox.dropped, **more})
        self._outbox.flush()

    def _rest(self, record: Record) -> None:
        """Once it ends: until the commands have stood still for a while, or for as long as that may take."""
        if self._ends_at < np.inf:
            self._still = self._still + 1 if record.source == "hold" else 0
            self.done = self._still >= _AT_REST or time.monotonic() >= self._ends_at


def open_arm(config: ControlConfig) -> tuple[RobotDriver, Executor]:
    """The connected arm of ``config`` and what drives it; raises UserError for what does not fit together."""
    driver, limits = open_driver(config.driver, config.driver_options), Limits.from_json(config.limits)
    limits.check_hardware(driver.spec)
    supervisor = Supervisor(limits, load(config.kinematics)() if config.kinematics else None)
    chunks = load(config.chunks)(**config.chunks_options)
    executor = Executor(driver, supervisor, chunks, attended=bool(config.teleoperator))
    driver.connect()
    return driver, executor


def open_teleoperator(config: ControlConfig) -> Child | None:
    """The process of the teleoperator of ``config``."""
    if not config.teleoperator:
        return None
    child = Child([sys.executable, "-m", "robot_drivers.teleop.process"], name="control")
    child.send({"teleoperator": config.teleoperator, "options": dict(config.teleoperator_options)})
    return child


def human_input(message: Mapping[str, Any]) -> HumanInput:
    """What the teleoperator's process has sent."""
    arrays = {name: message[name] for name in ("position", "velocity")}
    return HumanInput(
        captured=float(message["captured"]),
        engaged=bool(message["engaged"]),
        keys=tuple(str(key) for key in message["keys"]),
        deadman_at=None if message["deadman_at"] is None else float(message["deadman_at"]),
        **{name: None if array is None else np.asarray(array, np.float64) for name, array in arrays.items()},
    )


def main() -> None:
    """Serve the owner until it closes or is gone."""
    reader, writer = claim_pipes()
    inbox, outbox = Inbox(reader, "control"), Outbox(writer, "control")
    outbox.flush()
    config = ControlConfig(**_first(inbox))
    driver: RobotDriver | None = None
    teleoperator: Child | None = None
    claim = ExitStack()  # of the arm, until this process ends
    try:
        claim.enter_context(claimed(config.driver_options))
        driver, executor = open_arm(config)
        teleoperator = open_teleoperator(config)
        person = Inbox(teleoperator.fileno(), "control") if teleoperator else None
        first = take_priority()
        outbox.put(
            {
                "kind": "ready",
                "first": first,
                "resets": isinstance(driver, Resets),
                "teleoperator": teleoperator.pid if teleoperator else 0,
            }
        )
        gc.freeze()  # what is there stays, so a collection has little to look at
        Control(driver, executor, inbox, outbox, person).run()
    except Exception as error:  # whatever it is, the owner is told, and the robot is disconnected
        outbox.put({"kind": "failed", **error_answer(error, "the control process")})
        sys.exit(1)
    finally:
        if driver is not None:
            driver.disconnect()
        if teleoperator is not None:
            teleoperator.kill()
            teleoperator.close()
        claim.close()
        _flush(outbox)


def _first(inbox: Inbox) -> Mapping[str, Any]:
    """The first message: what this process is made of."""
    while not inbox.gone:
        for message in inbox.poll():
            return cast(Mapping[str, Any], message)
        time.sleep(0.005)
    sys.exit(f"the control process was told nothing, so it ends: {inbox.gone}")


def _flush(outbox: Outbox) -> None:
    """Let the owner read the rest, if it is there and quick."""
    end = time.monotonic() + 1.0
    while outbox.waiting and not outbox.gone and time.monotonic() < end:
        outbox.flush()
        time.sleep(0.005)


if __name__ == "__main__":
    main()
