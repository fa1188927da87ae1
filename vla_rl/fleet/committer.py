"""One thread that stores what all robots send: batches that arrive meanwhile share the next sync of the disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vla_rl.fleet.errors import RefusedError
from vla_rl.fleet.ledger import Receipt
from vla_rl.fleet.record import FleetRecord, Sender

log = logging.getLogger("vla_rl.fleet")
_COMMIT_BYTES = 16 << 20  # stored at once


class Store(Protocol):
    """What the server keeps records in; :class:`vla_rl.fleet.ledger.Ledger` is one."""

    def append(self, records: Sequence[FleetRecord]) -> Receipt: ...

    def durable(self, robot: str, epoch: str) -> int: ...

    def senders(self) -> Mapping[Sender, object]: ...


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one sender; ``done`` gets what became of them, in the committer's thread."""

    records: Sequence[FleetRecord]
    size: int  # bytes
    done: Callable[[Batch, Outcome], None]


@dataclass(frozen=True)
class Outcome:
    """``durable``: the sender's newest stored record; or why nothing was stored."""

    durable: int = -1
    refused: RefusedError | None = None
    failed: Exception | None = None


class Committer:
    """Stores batches in the order in which they come, for ever; who sends bounds how many bytes wait."""

    def __init__(self, store: Store) -> None:
        self._store, self._waiting = store, deque[Batch]()
        self.trouble = ""  # why the last batches were not stored
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="fleet-committer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Store ``batch`` as soon as those before it are; after :meth:`close` nothing is stored."""
        with self._wake:
            self._waiting.append(batch)
            self._wake.notify()

    def close(self) -> None:
        """End once the present commit is over."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while batches := self._next():
            outcomes = self._store_all(batches)
            for batch, outcome in zip(batches, outcomes, strict=True):
                try:
                    batch.done(batch, outcome)
                except Exception:  # of one robot's connection; the others are stored as before
                    log.exception("a robot could not be told what became of what it sent")

    def _next(self) -> list[Batch]:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            taken: list[Batch] = []
            while self._waiting and not self._closed and sum(one.size for one in taken) < _COMMIT_BYTES:
                taken.append(self._waiting.popleft())
            return taken

    def _store_all(self, batches: Sequence[Batch]) -> list[Outcome]:
        try:
            receipt = self._store.append([record for batch in batches for record in batch.records])
        except Exception as error:  # whatever it is, the robots keep their records and the server goes on
            log.error("%d batches were not stored: %s", len(batches), error)
            self.trouble = str(error) or type(error).__name__
            return [Outcome(failed=error)] * len(batches)
        self.trouble = ""
        senders = [batch.records[0].sender for batch in batches]
        return [Outcome(receipt.durable[sender], receipt.refused.get(sender)) for sender in senders]
