"""The robot's end of the fleet: every record is put into memory at once, and on the disk by a thread.

Whoever drives the arm only puts records; nothing that the disk or the server does makes it wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.errors import StoreEndedError, StoreFullError
from vla_rl.fleet.record import NO_HASH, FleetRecord
from vla_rl.fleet.spool_store import SpoolOptions, SpoolStore

log = logging.getLogger("vla_rl.fleet")
_GROUP = 256  # records that share a sync at most
_PATIENCE = 4  # times the memory of others that an episode with an intervention may take while the disk is slow
_RETRY_S = 1.0  # after the disk was full or failed


@dataclass
class _Lost:
    """How many records of a running episode were dropped in memory."""

    episode: str
    count: int


class Spool:
    """Records of ``robot`` in ``folder``: a :class:`vla_rl.fleet.attempt.Source` for the link.

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
        self._next, self._first = self._store.last + 1, self._store.first
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

    @property
    def first_seq(self) -> int:
        """The oldest record that is on the disk."""
        return self._first

    @property
    def next_seq(self) -> int:
        """The record that will be on the disk next."""
        return self._next

    def unacknowledged(self, seq: int, max_bytes: int) -> list[FleetRecord]:
        """Records on the disk from ``seq`` to before ``next_seq``; raises UserError while the disk fails.

        The store has records a moment before ``next_seq`` says so: sent then, they would be acknowledged too early.
        """
        end = self._next
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
            return self._changed.wait_for(lambda: self._next > seq, seconds)

    # What a person is told

    @property
    def unsent(self) -> int:
        """Records that the server is not known to have."""
        with self._wake:
            waiting = self._storing + sum(isinstance(one, FleetRecord) for one in self._waiting)
        return self._next - 1 - max(self._acknowledged, self._first - 1) + waiting

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
                self._next, self._first, self._busy = self._store.last + 1, self._store.first, False
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
