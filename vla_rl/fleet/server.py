"""The fleet's server: what robots send is on its disk before it says so, and a page shows how it goes.

The learner is a process of its own, which gets the ledger's records: its memory, its libraries and its mistakes cannot
stop what robots send from being stored.  Its end is an alarm on the page, and it is started again.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import check_folder
from vla_rl.fleet.identity import Credentials, Revoked, check_reach
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.page import Status, serve_page
from vla_rl.fleet.payloads import EpisodeEnd, check_step, unpack_introduction
from vla_rl.fleet.protocol import Backoff, BackoffOptions
from vla_rl.fleet.record import FleetRecord, Sender, decode
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import CanaryRule, Outcomes
from vla_rl.fleet.transport import FleetTransport, TransportOptions
from vla_rl.pages import PageAddress

log = logging.getLogger("vla_rl.fleet")
LEDGER, REGISTRY = "ledger", "registry"  # in a fleet's folder
_FED = struct.Struct("<QI")  # position in the ledger, bytes of the record
_FEED_S = 0.1  # how often the ledger is looked at when everything was sent
INBOX = 1024  # records that wait in a reader for being taken
_BATCH = 256  # records that are read at a time
_SHARE = 16  # one of so many steps is looked into while there is no time for all
PATIENCE_S = 60.0  # at the end, for the learner to save its state
_STEADY_S = 60.0  # a learner that ran for so long is started again at once
_MAX_LINE = 1 << 16
_LOW = 4 << 30  # bytes: with less room for records, a person should make some
_LOOK_S, _RETRY_S = 0.2, 1.0  # how often the ledger is looked at, and after a failure


def part_of_fleet(folder: Path, part: str) -> Path:
    """The folder ``part`` of a fleet's; raises UserError where there is none."""
    if not (folder / part).is_dir():
        raise UserError(f"{str(folder)!r} is no fleet's folder: it has no {part}; give the one of vla-rl serve.")
    check_folder(folder)
    return folder / part


@dataclass(frozen=True)
class FleetServerConfig:
    """Where robots connect, and the port of the page, which this machine alone can open (0: any that is free)."""

    transport: TransportOptions = field(default_factory=TransportOptions)
    page_port: int = 7791
    canary: CanaryRule = field(default_factory=CanaryRule)


class FleetServer:
    """Serves the fleet in ``folder`` until :meth:`close`.

    A SIGKILL at any moment loses nothing that was acknowledged.  Raises UserError when other machines could connect
    without certificates, when a port is taken, and when another server has the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: FleetServerConfig | None = None,
        credentials: Credentials | None = None,
        revoked: Revoked | None = None,
    ) -> None:
        config = config or FleetServerConfig()
        check_reach(config.transport.host, credentials)
        self.status, self._ending = Status(), threading.Event()
        with ExitStack() as opening:
            self.ledger = opening.enter_context(closing(Ledger(folder / LEDGER)))
            self.registry = Registry(folder / REGISTRY, config.canary)
            self.registry.set_back(self.ledger.position)
            self.page = opening.enter_context(closing(serve_page(self.status, PageAddress(port=config.page_port))))
            transport = FleetTransport(self.ledger, self.registry, config.transport, credentials, revoked)
            self.transport = opening.enter_context(closing(transport))
            self._watcher = Watcher(self.ledger, self.registry, self.status, transport.waiting, transport.alarms)
            self._thread = threading.Thread(target=self._watch, name="fleet-watcher", daemon=True)
            self._thread.start()
            self._opened = opening.pop_all()

    def learn(self, command: Sequence[str]) -> LearnerProcess:
        """Keep ``command`` running beside the server; it gets every record."""
        return self._opened.enter_context(closing(LearnerProcess(command, self.ledger, self.status)))

    def close(self) -> None:
        """End learner, connections and page; what was acknowledged is on the disk.  Safe to call twice."""
        self._ending.set()
        self._thread.join()
        self._opened.close()

    def _tell_of_the_disk(self) -> None:
        """What is wrong with it now, long before it is full."""
        folder, failed, trouble = self.ledger.folder, self.ledger.failed, self.transport.committer.trouble
        kept = "robots keep what they do and send it when it can be stored"
        failing = f"nothing is stored in {folder}, because {failed}; {kept}: look at the disk." if failed else ""
        self.status.standing("ledger", failing)
        refused = f"what robots sent last could not be stored ({trouble}); {kept}." if trouble and not failed else ""
        self.status.standing("storing", refused)
        room = self.ledger.room()
        low = ""
        if room == 0:
            low = f"the disk of {folder} is full, so nothing is stored; {kept}: free space on it."
        elif room < _LOW:
            low = f"the disk of {folder} has room for {room / 1e9:.1f} GB more; free space on it before it is full."
        self.status.standing("disk", low)

    def _watch(self) -> None:
        trouble = ""
        while not self._ending.is_set():
            more, now = False, ""
            try:
                self._tell_of_the_disk()
                self.ledger.reopen()
                more = self._watcher.look()
            except (
                Exception
            ) as error:  # whatever it is, it may work in a moment, and the page says since when it stands
                now = str(error) or type(error).__name__
                if now != trouble:
                    log.exception("what robots sent cannot be counted now")
            trouble = now
            self._ending.wait(_RETRY_S if trouble else 0.0 if more else _LOOK_S)


@dataclass(frozen=True)
class _Running:
    """A robot's newest episode, as far as its steps are stored; ``version`` is the highest of them (a person's: -1)."""

    sender: Sender | None = None
    episode: str = ""
    steps: int = 0
    version: int = -1


class Watcher:
    """Reads ``ledger`` from its beginning, so that after a restart the counts are those of before.

    waiting  {robot: records that it holds and the server does not}, of the robots that are connected
    alarms   sentences of others, which are taken out of it
    """

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        status: Status,
        waiting: Callable[[], Mapping[str, int]],
        alarms: deque[str],
    ) -> None:
        self._ledger, self._registry, self._status = ledger, registry, status
        self._waiting, self._alarms = waiting, alarms
        self._position, self._present = 0, frozenset[str]()
        self._stages: dict[int, str] = {}
        self._warned: frozenset[str] = frozenset()  # what the canary's alarms are, while it is tried
        self._running = dict[str, _Running]()  # by robot
        self._specs = dict[str, EnvSpec | None]()  # as robots introduced themselves
        self._begin = ledger.position  # what came before was looked into when it came
        self._misfits = dict[str, str]()  # the episode of each robot that was an alarm last

    def look(self) -> bool:
        """Take in what is new; returns whether there may be more at once."""
        waiting = self._waiting()
        self._presence(waiting)
        while self._alarms:
            self._status.alarm(self._alarms.popleft())
        for version, stage in self._registry.releases.stages.items():
            if self._stages.get(version) != stage:
                self._stages[version] = stage
                self._status.policy(version, stage)
        found = self._ledger.read(self._position, _BATCH)
        for position, record in found:
            if position > self._begin and (len(found) < _BATCH or position % _SHARE == 0):
                self._look_into(record)
            self._take(position, record, waiting.get(record.robot, 0))
            self._position = position
        if len(found) < _BATCH:
            self._status.looked()
        return len(found) == _BATCH

    def _presence(self, waiting: Mapping[str, int]) -> None:
        for robot, count in waiting.items():
            self._status.connected(robot, count)
        for robot in self._present - waiting.keys():
            self._status.disconnected(robot)
        self._present = frozenset(waiting)

    def _take(self, position: int, record: FleetRecord, waiting: int) -> None:
        """What can fail comes first: the record is taken in again then, and nothing of it has been counted."""
        if record.kind == "step":
            self._step(record)
        if record.kind == "event":
            self._introduced(record)
        if record.kind == "episode_end":
            try:
                end = EpisodeEnd.from_payload(record.payload)
                if end.outcome != "redo":  # a person had it played again
                    self._ended(position, record, end)
            except ContractError as error:
                self._status.alarm(f"robot {record.robot}, episode {record.episode}: {error}", record.robot)
        if record.kind == "dropped":
            self._status.dropped(record.robot, record.count)
        self._status.stored(record.robot, record.task, record.policy_version, len(record.payload), waiting)

    def _introduced(self, record: FleetRecord) -> None:
        try:
            self._specs[record.robot] = unpack_introduction(record.payload) or self._specs.get(record.robot)
        except ContractError as error:
            self._specs[record.robot] = None
            self._status.alarm(f"robot {record.robot}: {error}", record.robot)

    def _look_into(self, record: FleetRecord) -> None:
        """Say whose step nobody can learn from; it is stored as all others are."""
        if record.kind != "step" or self._misfits.get(record.robot) == record.episode:
            return
        try:
            check_step(record.payload, self._specs.get(record.robot))
        except ContractError as error:
            self._misfits[record.robot] = record.episode
            what = f"episode {record.episode} of robot {record.robot} is stored, and nothing can be learnt from it"
            self._status.alarm(f"{what}: {error}", record.robot)

    def _step(self, record: FleetRecord) -> None:
        before = self._running.get(record.robot, _Running())
        if (before.sender, before.episode) != (record.sender, record.episode):
            before = _Running(record.sender, record.episode)
        self._running[record.robot] = replace(
            before, steps=before.steps + 1, version=max(before.version, record.policy_version)
        )

    def _ended(self, position: int, record: FleetRecord, end: EpisodeEnd) -> None:
        """Interventions and clips are counted once an episode: their control steps belong together."""
        version, verdict = record.policy_version, None
        known = version in self._registry.releases.stages  # else it is nobody's policy, or one from elsewhere
        played = self._running.get(record.robot, _Running())
        if known and played != _Running(record.sender, record.episode, end.steps, version):
            known = False
            self._status.alarm(
                f"robot {record.robot} says that episode {record.episode} of {end.steps} steps ended by policy version "
                f"{version}, which its stored steps do not say, so it does not count for that version; look at it.",
                record.robot,
            )
        if known:
            alone = end.success and not end.intervened  # what a person rescued is no success of the policy
            found = Outcomes(1, int(alone), end.seconds, int(end.intervened > 0), int(end.clipped > 0))
            verdict = self._registry.record(position, record.robot, version, found)
        self._status.episode(record.robot, version, end)
        if not known:
            return
        if verdict is None:
            self._warned = frozenset()
            return
        for sentence in sorted({*verdict.alarms} - self._warned):
            self._status.alarm(sentence)
        self._warned |= {*verdict.alarms}
        if verdict.rollback:
            self._status.alarm(f"the canary was taken back: {verdict.why}; look at what it learned.")


class LearnerProcess:
    """Keeps ``command`` running until :meth:`close`.

    It reads records from its standard input (``received``) and ends when that ends.  Each line of its standard
    output is JSON: ``{"wanted": ...}``, the fields of ``Wanted``, before it gets any; then ``{"alarm": sentence}``, or
    ``{"learner": {name: number}}`` for the page.
    """

    def __init__(self, command: Sequence[str], ledger: Ledger, status: Status) -> None:
        self._command, self._ledger, self._status = command, ledger, status
        self._ending = threading.Event()
        self._backoff = Backoff(BackoffOptions(), random.Random())
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="fleet-learner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def close(self) -> None:
        """Let the learner save its state and end; safe to call twice."""
        self._ending.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                how = self._run()
            except (OSError, RuntimeError) as error:  # files, memory or threads ran out
                how = str(error)
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STEADY_S:
                self._backoff.reset()
            wait = self._backoff.next()
            sentence = (
                f"the learner ended ({how}) and is started again; nothing is learnt until it says how far it is, and "
                "what robots send is stored meanwhile: the server's log says why it ended."
            )
            log.error("%s", sentence)
            self._status.standing("learner", sentence)
            self._status.alarm(f"the learner ended ({how}) and was started again; the server's log says why.")
            self._ending.wait(wait)

    def _run(self) -> str:
        """One life of the process; returns how it ended."""
        # Ctrl-C is for the server, which then lets the learner save its state.
        pipe = subprocess.PIPE
        with subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
            self._process = process
            assert process.stdin is not None and process.stdout is not None
            over, asked = threading.Event(), queue.Queue[Wanted]()
            given, heard = (process.stdin, over, asked), (process.stdout, asked)
            feeding = threading.Thread(target=self._feed, args=given, name="fleet-feed", daemon=True)
            hearing = threading.Thread(target=self._hear, args=heard, name="fleet-hear", daemon=True)
            feeding.start()
            hearing.start()
            while process.poll() is None and not self._ending.wait(0.05):
                pass
            over.set()
            self._end(process)
            feeding.join()
            hearing.join()
            return f"exit code {process.returncode}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(PATIENCE_S)  # its input ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning(
                "the learner did not end within %g s and was killed; it goes on from its last state", PATIENCE_S
            )

    def _feed(self, pipe: BinaryIO, over: threading.Event, asked: queue.Queue[Wanted]) -> None:
        wanted = None
        while wanted is None and not over.is_set():
            with suppress(queue.Empty):
                wanted = asked.get(timeout=_FEED_S)
        with suppress(OSError):  # it is gone, which is told by its exit code
            send_records(self._ledger, pipe, over, wanted)
        with suppress(OSError):
            pipe.close()

    def _hear(self, pipe: BinaryIO, asked: queue.Queue[Wanted]) -> None:
        while line := pipe.readline(_MAX_LINE):
            try:
                said = json.loads(line)
                if "wanted" in said:
                    one = said["wanted"]
                    asked.put(Wanted(int(one["begin"]), int(one["position"]), str(one["name"])))
                elif "alarm" in said:
                    log.warning("%s", said["alarm"])  # a page that ends is read no more
                    self._status.alarm(str(said["alarm"]))
                else:
                    self._status.standing("learner", "")
                    self._status.learner({str(name): float(value) for name, value in said["learner"].items()})
            except (ValueError, TypeError, KeyError, AttributeError):
                log.warning("the learner says %r, which is no message", line[:200])


@dataclass(frozen=True)
class Wanted:
    """What a learner needs of a ledger: the records from position ``begin`` on.

    ``name``, the beginning of the hash of the record at ``position``, the last that it took, says whether this is that
    ledger: in one that was set back to a copy, others are there.  Then it needs all of them.
    """

    begin: int = 1
    position: int = 0
    name: str = ""

    def after(self, ledger: Ledger) -> int:
        """Behind which position it needs records."""
        found = ledger.read(self.position - 1, 1) if self.position > 0 else []
        same = bool(found and self.name) and found[0][0] == self.position
        return self.begin - 1 if same and found[0][1].hash.hex().startswith(self.name) else 0


def send_records(ledger: Ledger, pipe: BinaryIO, ending: threading.Event, wanted: Wanted | None = None) -> None:
    """Write the records of ``ledger`` that are ``wanted`` (None: all), and new ones as they come, until ``ending``.

    A reader that is slow is waited for, and so is a ledger that gives nothing now.  Raises OSError when the reader is
    gone.
    """
    position, trouble = -1, ""
    while not ending.is_set():
        try:
            position = (wanted or Wanted()).after(ledger) if position < 0 else position
            found, now = ledger.read(position, _BATCH), ""
        except (UserError, OSError, MemoryError) as error:
            found, now = [], str(error) or type(error).__name__
        if now and now != trouble:
            log.warning("the learner waits for the ledger: %s", now)
        trouble = now
        for position, record in found:
            pipe.write(_FED.pack(position, len(record.encoded)) + record.encoded)
        pipe.flush()
        if not found:
            ending.wait(_FEED_S)


def received(pipe: BinaryIO) -> Iterator[tuple[int, FleetRecord]]:
    """Positions and records until the writer ends; a record of which only a part came is left out.

    Raises ContractError for other bytes.
    """
    last = 0
    while len(head := pipe.read(_FED.size)) == _FED.size:
        position, size = _FED.unpack(head)
        if position <= last:
            raise ContractError(
                f"the record at position {position} came behind the one at {last}, so none is taken from here on; look "
                "at the program that writes them."
            )
        data = pipe.read(size)
        if len(data) < size:
            return
        yield position, decode(data)
        last = position


class Inbox:
    """What :func:`received` gives, read by a thread: whoever takes it waits for the pipe no longer than it wants."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.ended = False  # the writer has ended and everything is taken
        self._pipe = pipe
        self._error: ContractError | None = None
        self._held: queue.Queue[tuple[int, FleetRecord] | ContractError | None] = queue.Queue(INBOX)
        threading.Thread(target=self._read, name="fleet-inbox", daemon=True).start()

    def take(self, seconds: float) -> list[tuple[int, FleetRecord]]:
        """What is there after at most ``seconds``, at most ``INBOX``.

        Raises ContractError when the pipe brought something else behind what was taken.
        """
        found = list[tuple[int, FleetRecord]]()
        with suppress(queue.Empty):
            while len(found) < INBOX and not self.ended and self._error is None:
                one = self._held.get(timeout=0.0 if found else seconds)
                if isinstance(one, tuple):
                    found.append(one)
                self.ended, self._error = one is None, one if isinstance(one, ContractError) else None
        if self._error is not None and not found:
            raise self._error
        return found

    def _read(self) -> None:
        try:
            for item in received(self._pipe):
                self._held.put(item)
            self._held.put(None)
        except ContractError as error:
            self._held.put(error)
