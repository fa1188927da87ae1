"""The robot's end of the fleet: every record is put into memory at once, and on the disk by a thread.

Whoever drives the arm only puts records; nothing that the disk or the server does makes it wait.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from vla_rl.contract.config import Checked, within
from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import Disk, StoreEndedError, StoreFullError
from vla_rl.fleet.index import Span
from vla_rl.fleet.ledger import SEGMENT_BYTES, Ledger
from vla_rl.fleet.protocol import MAX_RECORDS
from vla_rl.fleet.record import NO_HASH, FleetRecord, Sender

log = logging.getLogger("vla_rl.fleet")
_GROUP = 256  # records that share a sync at most
_PATIENCE = 4  # times the memory of others that an episode with an intervention may take while the disk is slow
_RETRY_S = 1.0  # after the disk was full or failed


@dataclass(frozen=True)
class SpoolOptions(Checked):
    """How much of the robot's disk and memory its records may take.

    quota_mb    of records on the disk; episodes with an intervention may exceed it
    reserve_mb  of the disk that stay free
    queue_mb    of records that wait for the disk in memory; four times as much in an episode with an intervention
    """

    quota_mb: float = within(20_000, 0.001, 1000000000.0)
    reserve_mb: float = within(256, 0, 1000000000.0)
    queue_mb: float = within(64, 0.001, 1000000.0)


@dataclass
class _Lost:
    """How many records of a running episode were dropped in memory."""

    episode: str
    count: int


class Spool:
    """Records of ``robot`` in ``folder``, oldest first, for the link.

    Raises UserError for a folder of another robot, or one that another process has open.
    """

    def __init__(self, folder: Path, robot: str, options: SpoolOptions | None = None, disk: Disk | None = None) -> None:
        options = options or SpoolOptions()
        self._limit = round(options.queue_mb * 2**20)
        self._open: Callable[[], SpoolStore] = lambda: SpoolStore(folder, robot, options, disk)
        self._store = self._open()
        self.robot, self.epoch = self._store.sender
        self._waiting: deque[FleetRecord | _Lost] = deque()
        self._size = 0  # bytes in memory
        self._running, self._intervened = "", False  # the running episode, and whether a person chose anything in it
        self._wake, self._changed = threading.Condition(), threading.Condition()
        self._closing, self._busy, self._acknowledged = False, False, -1
        self._storing = 0  # records that are on their way to the disk
        self._ended = False  # the store is to be opened again
        self.next_seq = self._store.last + 1  # the record that will be on the disk next
        self.first_seq = self._store.first  # the oldest record that is there
        self._dropped = (0, 0)  # episodes and records, of stores that failed
        self.trouble = ""  # what is wrong with the disk now
        self._thread = threading.Thread(target=self._run, name="fleet-spool", daemon=True)
        self._thread.start()

    def put(
        self,
        kind: str,
        payload: bytes,
        *,
        episode: str = "",
        task: str = "",
        policy_version: int = 0,
        intervened: bool = False,
        captured_ns: int = 0,
    ) -> None:
        """Take a record, without waiting for anything; records of an episode follow each other.

        When memory is full because the disk is slow, the running episode is dropped whole.
        """
        record = FleetRecord(
            robot=self.robot,
            epoch=self.epoch,
            seq=0,
            kind=kind,
            previous=NO_HASH,
            episode=episode,
            task=task,
            policy_version=policy_version,
            intervened=intervened,
            captured_ns=captured_ns,
            wall_ns=time.time_ns(),
            payload=payload,
        )
        with self._wake:
            if episode != self._running:
                self._running, self._intervened = episode, False
            self._intervened |= intervened
            limit = self._limit * (_PATIENCE if self._intervened or not episode else 1)
            if self._size + len(payload) > limit:
                self._lose(episode)
            else:
                self._waiting.append(record)
                self._size += len(payload)
            self._wake.notify()

    def _lose(self, episode: str) -> None:
        """Drop what memory holds of the running episode; the store drops the rest of it."""
        lost = _Lost(episode, 1)
        while self._waiting and self._waiting[-1].episode == episode:
            newest = self._waiting.pop()
            if isinstance(newest, _Lost):
                lost.count += newest.count
            else:
                lost.count, self._size = lost.count + 1, self._size - len(newest.payload)
        self._waiting.append(lost)

    # What the link asks

    def unacknowledged(self, seq: int, max_bytes: int) -> list[FleetRecord]:
        """Records on the disk from ``seq`` to before ``next_seq``; raises UserError while the disk fails.

        The store has records a moment before ``next_seq`` says so: sent then, they would be acknowledged too early.
        """
        end = self.next_seq
        try:
            return [record for record in self._store.read(seq, max_bytes) if record.last < end]
        except StoreEndedError:
            with self._wake:
                self._ended = True
                self._wake.notify()
            raise

    def acknowledged(self, seq: int) -> None:
        """The server has all up to ``seq``, so they may leave the disk."""
        with self._wake:
            self._acknowledged = max(seq, self._acknowledged)
            self._wake.notify()

    def wait(self, seq: int, seconds: float) -> bool:
        """Whether record ``seq`` is on the disk, after ``seconds`` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self.next_seq > seq, seconds)

    # What a person is told

    @property
    def unsent(self) -> int:
        """Records that the server is not known to have."""
        with self._wake:
            waiting = self._storing + sum(isinstance(one, FleetRecord) for one in self._waiting)
        return self.next_seq - 1 - max(self._acknowledged, self.first_seq - 1) + waiting

    @property
    def dropped(self) -> tuple[int, int]:
        """Episodes and records that were dropped, because disk or memory were full."""
        return self._dropped[0] + self._store.dropped_episodes, self._dropped[1] + self._store.dropped_records

    def flush(self, seconds: float) -> bool:
        """Whether all that was put is on the disk, after ``seconds`` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def close(self, seconds: float = 30.0) -> None:
        """Bring to the disk what is in memory, for ``seconds`` at most, and release the folder."""
        self.flush(seconds)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(seconds)

    # The thread

    def _run(self) -> None:
        done = -1
        while True:
            with self._wake:
                while not (self._waiting or self._closing or self._ended or self._acknowledged > done):
                    self._wake.wait()
                if self._closing:
                    break
                group, done = self._take(), self._acknowledged
            self._keep(group, done)
            with self._changed:
                self.next_seq, self.first_seq, self._busy = self._store.last + 1, self._store.first, False
                self._storing = 0  # after they are counted there
                self._changed.notify_all()
        self._store.close()

    def _take(self) -> Sequence[FleetRecord] | _Lost:
        """What is stored together next: of one episode, so that it is stored whole or not at all."""
        self._busy = bool(self._waiting)
        records: list[FleetRecord] = []
        while self._waiting and len(records) < _GROUP:
            one = self._waiting[0]
            if isinstance(one, _Lost):
                return records or self._waiting.popleft()  # type: ignore[return-value]
            if records and one.episode != records[0].episode:
                break
            records.append(one)
            self._waiting.popleft()
            self._size -= len(one.payload)
            self._storing = len(records)
        return records

    def _keep(self, group: Sequence[FleetRecord] | _Lost, acknowledged: int) -> None:
        """Store it, however long that takes; given up only when the spool is closed."""
        while True:
            try:
                if self._ended:
                    group = self._reopen(group)
                self._store.acknowledged(acknowledged)
                if isinstance(group, _Lost):
                    self._store.lose(group.episode, group.count)
                elif group:
                    self._store.add(group)
                self.trouble = ""
                return
            except (StoreFullError, MemoryError) as error:
                self._complain(error)
            except (UserError, OSError) as error:
                self._complain(error)
                self._ended = True
            with self._wake:
                if self._wake.wait_for(lambda: self._closing, _RETRY_S):
                    return

    def _complain(self, error: Exception) -> None:
        what = str(error) or "memory ran out"
        if what != self.trouble:
            log.error("%s", what)
        self.trouble = what

    def _reopen(self, group: Sequence[FleetRecord] | _Lost) -> Sequence[FleetRecord] | _Lost:
        """Open the store again after its disk failed; returns what of ``group`` is not on it.  Raises as it does."""
        with suppress(UserError, OSError):
            self._store.close()
        with ExitStack() as undo:
            store = undo.enter_context(closing(self._open()))
            last = store.last
            tail = store.read(max(store.first, last + 1 - _GROUP), 1 << 40) if last >= store.first else []
            undo.pop_all()
        store.go_on_from(self._store)
        self._dropped, self._store, self._ended = self.dropped, store, False
        if isinstance(group, _Lost):
            return group
        there = {_identity(one) for one in tail}
        return [one for one in group if _identity(one) not in there]


def _identity(record: FleetRecord) -> tuple[object, ...]:
    """What tells a record from others before it has a number."""
    return (record.wall_ns, record.captured_ns, record.episode, record.kind, record.payload)


class SpoolStore:
    """The records of ``robot`` in ``folder``, in episodes; for one process and any of its threads.

    A new folder is a new epoch.  When the quota or the disk is full, the oldest autonomous episode is dropped whole: a
    record of kind "dropped" stands for its records from then on.  ``dropped_episodes`` and ``dropped_records`` count
    them since the store was opened.  Raises UserError for a folder of another robot.
    """

    def __init__(
        self,
        folder: Path,
        robot: str,
        options: SpoolOptions | None = None,
        disk: Disk | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        options = options or SpoolOptions()
        self._quota, reserve = round(options.quota_mb * 2**20), round(options.reserve_mb * 2**20)
        self._ledger = Ledger(folder, disk, reserve=reserve, segment_bytes=segment_bytes)
        self._lock = threading.RLock()
        try:
            self.sender = _sender(self._ledger, robot)
        except UserError:
            self._ledger.close()
            raise
        self.dropped_episodes = self.dropped_records = 0
        self._untold = 0  # records that were dropped before they had a number
        self._given_up: str | None = None  # the running episode, of which nothing more is stored
        self._acknowledged = -1
        self._episodes: list[Span] = []
        for span in self._ledger.spans(self.sender):
            self._note(span)
        self._ledger.roll()

    def go_on_from(self, before: SpoolStore) -> None:
        """Know what ``before``, of the same folder, knew of the running episode and could not bring to the disk."""
        self._given_up, self._untold = before._given_up, before._untold

    @property
    def first(self) -> int:
        """The oldest record that is here; the next one when there is none."""
        with self._lock:
            return self._episodes[0].first if self._episodes else self.last + 1

    @property
    def last(self) -> int:
        """The newest record that survives a power cut; -1 for none."""
        return self._ledger.durable(*self.sender)

    def add(self, records: Sequence[FleetRecord]) -> None:
        """Number ``records`` and store them; on the disk when this returns.

        Raises StoreFullError when there is no room and nothing that may be dropped, and StoreEndedError when the disk
        failed; then some of them may be stored, which ``last`` says of the same store when it is opened again.
        """
        with self._lock:
            for name, group in groupby(records, lambda record: record.episode):
                self._add_to(name, list(group))

    def _add_to(self, name: str, records: Sequence[FleetRecord]) -> None:
        if not self._episodes or self._episodes[-1].episode != name:
            self._ledger.roll()
        kept = not name or any(record.intervened for record in records)
        if kept and self._episodes and self._episodes[-1].episode == name:
            self._episodes[-1].kept = True
        size = sum(len(record.encoded) for record in records)
        while self._given_up != name and self._used() + size > self._quota and self._drop_oldest(name):
            pass
        while True:
            if self._given_up == name and name:
                self._count(len(records))
                return
            self._given_up = None
            try:
                return self._append(name, kept, records)
            except StoreFullError:
                if not self._drop_oldest(name):
                    raise

    def _append(self, name: str, kept: bool, records: Sequence[FleetRecord]) -> None:
        self._tell()
        last, previous = self._ledger.head(*self.sender)
        chained: list[FleetRecord] = []
        for record in records:
            last, robot = last + 1, self.sender.robot
            chained.append(replace(record, robot=robot, epoch=self.sender.epoch, seq=last, previous=previous))
            previous = chained[-1].hash
        self._ledger.append(chained)
        self._note(Span(name, chained[0].seq, chained[-1].last, sum(len(one.encoded) for one in chained), kept))

    def _tell(self) -> None:
        """Store how many records were dropped before they had a number."""
        if self._untold:
            last, hash = self._ledger.head(*self.sender)
            self._ledger.roll()
            self._ledger.append([self._dropped(last + 1, last + self._untold, hash, hash)])
            self._ledger.roll()
            self._episodes.append(Span("", last + 1, last + self._untold, 0, True))
            self._untold = 0

    def _note(self, new: Span) -> None:
        """Take records into account that are behind all others."""
        last = self._episodes[-1] if self._episodes else None
        if last is not None and last.episode == new.episode and last.last + 1 == new.first and last.episode:
            last.last, last.size, last.kept = new.last, last.size + new.size, last.kept or new.kept
        else:
            self._episodes.append(new)

    def lose(self, episode: str, count: int) -> None:
        """Note that ``count`` records of the running ``episode`` were dropped before they came here."""
        with self._lock:
            running = self._episodes[-1] if self._episodes else None
            if self._given_up != episode:
                self._given_up = episode
                if running is not None and running.episode == episode and not running.kept:
                    self._drop(running)
                else:
                    self.dropped_episodes += 1
            self._count(count)

    def _count(self, records: int) -> None:
        self._untold += records
        self.dropped_records += records

    def _used(self) -> int:
        return sum(one.size for one in self._episodes)

    def _drop_oldest(self, running: str) -> bool:
        """Drop the oldest episode that may go; whether there was one."""
        self._trim()
        oldest = next((one for one in self._episodes if not one.kept), None)
        if oldest is None:
            return False
        if oldest is self._episodes[-1] and oldest.episode == running:
            self._given_up = running
        self._drop(oldest)
        return True

    def _drop(self, episode: Span) -> None:
        log.warning(
            "episode %s is dropped with its %d records, because the robot's disk is full; the server does not get "
            "it: connect the robot, or give the spool more of the disk.",
            *(episode.episode, episode.last - episode.first + 1),
        )
        at = self._episodes.index(episode)
        begin = self._episodes[at - 1] if at and self._episodes[at - 1].size == 0 else episode
        self._give_up(begin.first, episode.last)
        self._episodes[at] = Span("", begin.first, episode.last, 0, True)
        if begin is not episode:
            del self._episodes[at - 1]
        self.dropped_episodes += 1
        self.dropped_records += episode.last - episode.first + 1
        self._ledger.trim(self.sender, self._acknowledged)

    def _give_up(self, first: int, last: int) -> None:
        """Have a record stand for these; its hashes are those of the index, or of what is readable beside them."""
        before, end = (self._ledger.hash_at(self.sender, seq) for seq in (first - 1, last))
        if before is None and (here := self._ledger.sent_by(self.sender, first, 1)) and here[0].seq == first:
            before = here[0].previous
        if end is None and (behind := self._ledger.sent_by(self.sender, last + 1, 1)) and behind[0].seq == last + 1:
            end = behind[0].previous
        self._ledger.give_up(self._dropped(first, last, before or NO_HASH, end or NO_HASH))

    def _dropped(self, first: int, last: int, before: bytes, hash: bytes) -> FleetRecord:
        robot, epoch = self.sender
        return FleetRecord(
            robot=robot, epoch=epoch, seq=first, count=last - first + 1, kind="dropped", previous=before, payload=hash
        )

    def acknowledged(self, seq: int) -> None:
        """The server has all up to ``seq``: what is not needed any more is removed from the disk."""
        with self._lock:
            if seq > self._acknowledged:
                self._acknowledged = seq
                self._trim()

    def _trim(self) -> None:
        if self._episodes and self._episodes[0].last <= self._acknowledged:
            self._ledger.trim(self.sender, self._acknowledged)
            self._episodes = [one for one in self._episodes if one.last > self._acknowledged]

    def read(self, seq: int, max_bytes: int) -> list[FleetRecord]:
        """Records from ``seq`` on; what the disk has spoilt among them becomes a record of kind "dropped"."""
        with self._lock:
            found = self._ledger.sent_by(self.sender, seq, MAX_RECORDS, max_bytes)
            end = found[0].seq if found else self.last + 1
            if seq < end:
                self._give_up(seq, end - 1)
                self.dropped_records += end - seq
                return self.read(seq, max_bytes)
            gap = (i for i, (one, other) in enumerate(pairwise(found), 1) if one.last + 1 != other.seq)
            return found[: next(gap, len(found))]

    def close(self) -> None:
        """Release the folder; everything that was added is on the disk already."""
        try:
            with self._lock, suppress(UserError):  # of a disk that is full or failed
                self._tell()
        finally:
            self._ledger.close()


def _sender(ledger: Ledger, robot: str) -> Sender:
    """Whose records these are; a new epoch when there are none."""
    senders = list(ledger.senders())
    if not senders:
        return Sender(robot, uuid.uuid4().hex)
    if senders[0].robot != robot:
        raise UserError(
            f"the spool in {ledger.folder} is of robot {senders[0].robot!r} and not of {robot!r}, so nothing is added "
            "to it; start the robot by its own name, or in another folder."
        )
    return senders[0]
