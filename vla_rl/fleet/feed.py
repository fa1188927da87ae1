"""A ledger's records through a pipe, for a process beside the server, which alone has the ledger open."""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord, decode

log = logging.getLogger("vla_rl.fleet")
_HEAD = struct.Struct("<QI")  # position in the ledger, bytes of the record
_BATCH = 256  # records that are read at a time
_LOOK_S = 0.1  # how often the ledger is looked at when everything was sent
INBOX = 1024  # records that wait in a reader for being taken


def send(ledger: Ledger, pipe: BinaryIO, ending: threading.Event) -> None:
    """Write the records of ``ledger`` from its beginning, and new ones as they come, until ``ending``.

    A reader that is slow is waited for, and so is a ledger that gives nothing now.  Raises OSError when the reader is
    gone.
    """
    position, trouble = 0, ""
    while not ending.is_set():
        try:
            found, now = ledger.read(position, _BATCH), ""
        except (UserError, OSError, MemoryError) as error:
            found, now = [], str(error) or type(error).__name__
        if now and now != trouble:
            log.warning("the learner waits for the ledger: %s", now)
        trouble = now
        for position, record in found:
            pipe.write(_HEAD.pack(position, len(record.encoded)) + record.encoded)
        pipe.flush()
        if not found:
            ending.wait(_LOOK_S)


def received(pipe: BinaryIO) -> Iterator[tuple[int, FleetRecord]]:
    """Positions and records until the writer ends; a record of which only a part came is left out.

    Raises ContractError for other bytes.
    """
    last = 0
    while len(head := pipe.read(_HEAD.size)) == _HEAD.size:
        position, size = _HEAD.unpack(head)
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
    """What :func:`received` gives, read by a thread: whoever takes it never waits for the pipe."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe, self._held = pipe, deque[tuple[int, FleetRecord]]()
        self._changed, self._over = threading.Condition(), False
        self._error: ContractError | None = None
        threading.Thread(target=self._read, name="fleet-inbox", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the writer has ended and everything is taken."""
        with self._changed:
            return self._over and not self._held

    def take(self) -> list[tuple[int, FleetRecord]]:
        """What is there, at most ``INBOX``; raises ContractError when the pipe brought something else."""
        with self._changed:
            found = list(self._held)
            self._held.clear()
            self._changed.notify_all()
            if not found and self._error is not None:
                raise self._error
            return found

    def wait(self, seconds: float) -> None:
        """Until something is there, for ``seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._over, seconds)

    def _read(self) -> None:
        try:
            for item in received(self._pipe):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._held) < INBOX)
                    self._held.append(item)
                    self._changed.notify_all()
        except ContractError as error:
            self._error = error
        with self._changed:
            self._over = self._error is None
            self._changed.notify_all()
