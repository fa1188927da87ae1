"""What a ledger refuses, and how it ends: each error says what to do about it."""

from __future__ import annotations

import errno
import sqlite3

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.record import FleetRecord

_RAN_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class RefusedError(ContractError):
    """A record that the ledger did not take; ``expected`` is the sequence number that it would take."""

    def __init__(self, sentence: str, record: FleetRecord, expected: int) -> None:
        super().__init__(sentence)
        self.record, self.expected = record, expected


class GapError(RefusedError):
    """A record came before the one that it follows."""

    def __init__(self, record: FleetRecord, expected: int) -> None:
        super().__init__(
            f"robot {record.robot!r} sent record {record.seq} of epoch {record.epoch[:8]} where {expected} is the "
            f"next, so it is not stored; send from {expected} on.",
            record,
            expected,
        )


class ConflictError(RefusedError):
    """A record that contradicts what is stored: another one has its number, or it follows another one."""

    def __init__(self, record: FleetRecord, expected: int, what: str) -> None:
        super().__init__(
            f"robot {record.robot!r} sent record {record.seq} of epoch {record.epoch[:8]}, {what}, so it is set aside; "
            "look for two robots of one name, or a spool that was copied or set back.",
            record,
            expected,
        )


class StoreFullError(UserError):
    """There is no room for a record (``ran_out``); nothing of the batch was stored, and the ledger goes on."""


class StoreEndedError(UserError):
    """The disk failed, so the ledger takes and acknowledges nothing more until it is opened again."""


def ran_out(error: Exception) -> bool:
    """Whether room, open files or memory ran out: nothing of the disk is broken, and it may work in a moment."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _RAN_OUT)
