"""The SQLite index of a ledger: which record is where, and how far every sender is.

The segments are the truth about records, and the index is rebuilt from them when it is lost; the refused records are in
the index alone.  A transaction is durable when it is committed: WAL with synchronous=FULL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vla_rl.fleet.disk import Disk, SegmentName
from vla_rl.fleet.record import KINDS, NO_HASH, FleetRecord, Sender

LAYOUT = 1  # of the tables
_REMOVED = -1  # in place of a segment's committed bytes: its file is being removed
_CONFLICTS = 64  # refused records that are kept, the newest
_TABLES = f"""
CREATE TABLE IF NOT EXISTS senders (
    id INTEGER PRIMARY KEY, robot TEXT, epoch TEXT, last INTEGER, hash BLOB, UNIQUE (robot, epoch));
CREATE TABLE IF NOT EXISTS records (
    position INTEGER PRIMARY KEY, sender INTEGER, seq INTEGER, last INTEGER, segment INTEGER, start INTEGER,
    length INTEGER, kind INTEGER, episode TEXT, task TEXT, version INTEGER, intervened INTEGER, hash BLOB,
    damaged INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS by_seq ON records (sender, seq);
CREATE INDEX IF NOT EXISTS ends ON records (position) WHERE kind = {KINDS.index("episode_end")};
CREATE INDEX IF NOT EXISTS ends_by_seq ON records (sender, seq) WHERE kind = {KINDS.index("episode_end")};
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, seed INTEGER, committed INTEGER);
CREATE TABLE IF NOT EXISTS consumers (name TEXT PRIMARY KEY, position INTEGER);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER);
INSERT OR IGNORE INTO numbers VALUES ('position', 0), ('openings', 0);
CREATE TABLE IF NOT EXISTS conflicts (id INTEGER PRIMARY KEY, robot TEXT, epoch TEXT, seq INTEGER, record BLOB);
"""


class Head(NamedTuple):
    """A sender's last durable record: its sequence number and hash."""

    last: int = -1
    hash: bytes = NO_HASH


class Row(NamedTuple):
    """Where a record is: frame ``start`` and ``length`` in a segment."""

    position: int
    segment: int
    start: int
    length: int
    record: FleetRecord


class Place(NamedTuple):
    """Where a stored record is, and the sequence number that it ends with."""

    position: int
    name: SegmentName
    start: int
    length: int
    last: int
    hash: bytes


@dataclass
class Span:
    """Records of one sender that are together in a segment and of one episode ("" for none).

    ``first`` to ``last``: their sequence numbers; ``size``: bytes; ``kept``: whether one of them was intervened, or is
    no step and no end of an episode.
    """

    episode: str
    first: int
    last: int
    size: int
    kept: bool


class Index:
    """Raises sqlite3.Error for what the disk or a damaged file refuses; a failed transaction changed nothing."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._db = disk.database(path)
        try:
            self._prepare()
        except sqlite3.Error:
            self._db.close()
            raise

    def _prepare(self) -> None:
        # One process at a time: the first transaction locks the database until it is closed.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (layout,) = self._db.execute("PRAGMA user_version").fetchone()
        if layout not in (0, LAYOUT):
            raise sqlite3.DatabaseError(f"layout {layout} instead of {LAYOUT}")
        # A killed process may have left a commit that is not on the disk yet; this one takes it there.
        with self.transaction():
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {LAYOUT}")
            self._db.execute("UPDATE numbers SET value = value + 1 WHERE name = 'openings'")
        if (found := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        self._ids: dict[Sender, int] = {}
        self.remember_senders()

    def _all(self, query: str, *values: object) -> list[tuple]:
        return self._db.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block does, or nothing of it when it raises."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    # Senders and records

    def heads(self) -> dict[Sender, Head]:
        return {Sender(*row[:2]): Head(*row[2:]) for row in self._all("SELECT robot, epoch, last, hash FROM senders")}

    def set_heads(self, heads: Mapping[Sender, Head]) -> None:
        """Note the last records of senders; part of a transaction."""
        for sender, head in heads.items():
            n = self._id(sender)
            self._db.execute("UPDATE senders SET last = ?, hash = ? WHERE id = ?", (*head, n))

    def _id(self, sender: Sender) -> int:
        if sender not in self._ids:
            query = "SELECT id FROM senders WHERE robot = ? AND epoch = ?"
            self._db.execute("INSERT OR IGNORE INTO senders VALUES (NULL, ?, ?, -1, ?)", (*sender, NO_HASH))
            return int(self._all(query, *sender)[0][0])
        return self._ids[sender]

    def add(self, rows: Iterable[Row]) -> None:
        """Note where new records are; part of a transaction."""
        values = [
            (
                *(row.position, self._id(record.sender), record.seq, record.last, row.segment, row.start, row.length),
                *(KINDS.index(record.kind), record.episode, record.task, record.policy_version, record.intervened),
                *(record.hash, 0),
            )
            for row in rows
            for record in (row.record,)
        ]
        self._db.executemany(f"INSERT INTO records VALUES ({', '.join('?' * 14)})", values)

    def forget(self, sender: Sender, first: int, last: int) -> None:
        """Forget the records with these sequence numbers; part of a transaction."""
        self._db.execute(
            "DELETE FROM records WHERE sender = ? AND seq BETWEEN ? AND ?", (self._id(sender), first, last)
        )

    def remember_senders(self) -> None:
        """Called after a commit: what it numbered stays."""
        self._ids = {Sender(robot, epoch): n for n, robot, epoch in self._all("SELECT id, robot, epoch FROM senders")}

    def hash_at(self, sender: Sender, last: int) -> bytes | None:
        """The hash of the stored record that ends with sequence number ``last``; None when there is none."""
        query = "SELECT last, hash FROM records WHERE sender = ? AND seq <= ? ORDER BY seq DESC LIMIT 1"
        found = self._all(query, self._ids.get(sender, -1), last)
        return found[0][1] if found and found[0][0] == last else None

    def after(self, position: int, count: int) -> list[Place]:
        """Up to ``count`` records behind ``position``, in the order in which they came."""
        return self._places("position > ? ORDER BY position LIMIT ?", position, count)

    def of(self, sender: Sender, seq: int, count: int) -> list[Place]:
        """Up to ``count`` records of ``sender`` from sequence number ``seq`` on, by number."""
        where = "sender = ? AND last >= ? AND seq >= ? ORDER BY seq LIMIT ?"
        first = self._all("SELECT max(seq) FROM records WHERE sender = ? AND seq <= ?", self._ids.get(sender, -1), seq)
        return self._places(where, self._ids.get(sender, -1), seq, first[0][0] or 0, count)

    def _places(self, where: str, *values: object, damaged: int = 0) -> list[Place]:
        query = (
            "SELECT position, number, seed, start, length, last, hash FROM records JOIN segments ON number = segment"
            f" WHERE damaged = {damaged} AND {where}"
        )
        return [Place(row[0], SegmentName(*row[1:3]), *row[3:]) for row in self._all(query, *values)]

    def spans(self, sender: Sender) -> list[Span]:
        """Where the records of ``sender`` are, by sequence number."""
        own = ", ".join(str(KINDS.index(kind)) for kind in ("step", "episode_end"))
        query = (
            f"SELECT episode, min(seq) AS first, max(last), sum(length), max(intervened OR kind NOT IN ({own})) AS kept"
            " FROM records WHERE sender = ? GROUP BY segment, episode ORDER BY first"
        )
        return [
            Span(row[0], row[1], row[2], row[3], bool(row[4])) for row in self._all(query, self._ids.get(sender, -1))
        ]

    def last_position(self) -> int:
        """The position of the newest record, also of one that is no longer there; 0 before the first."""
        return int(self._all("SELECT value FROM numbers WHERE name = 'position'")[0][0])

    def set_last_position(self, position: int) -> None:
        """Note the position of the newest record; part of a transaction."""
        self._db.execute("UPDATE numbers SET value = ? WHERE name = 'position'", (position,))

    def damage(self, position: int, damaged: bool = True) -> None:
        """Set the record at ``position`` aside, or take it back; part of a transaction."""
        self._db.execute("UPDATE records SET damaged = ? WHERE position = ?", (int(damaged), position))

    def set_aside(self) -> list[Place]:
        """Where the records are that are set aside."""
        return self._places("true ORDER BY position", damaged=1)

    # Segments

    def segments(self) -> dict[int, tuple[SegmentName, int]]:
        """Name and committed bytes of every segment, by number."""
        found = self._all("SELECT number, seed, committed FROM segments WHERE committed != ?", _REMOVED)
        return {row[0]: (SegmentName(*row[:2]), row[2]) for row in found}

    def set_segment(self, name: SegmentName, committed: int) -> None:
        """Note up to where a segment counts; part of a transaction."""
        self._db.execute("REPLACE INTO segments VALUES (?, ?, ?)", (*name, committed))

    def remove_segments(self, sender: Sender, seq: int, but: SegmentName | None) -> None:
        """Forget the segments, but one, that hold nothing but records of ``sender`` up to ``seq``; part of a
        transaction.  Their files, :meth:`removed`, are to be removed, and then :meth:`forget_removed` called.
        """
        needed = "SELECT segment FROM records WHERE sender != ? OR last > ?"
        query = f"UPDATE segments SET committed = {_REMOVED} WHERE number != ? AND number NOT IN ({needed})"
        self._db.execute(query, (but.number if but else -1, self._ids.get(sender, -1), seq))
        gone = f"SELECT number FROM segments WHERE committed = {_REMOVED}"
        self._db.execute(f"DELETE FROM records WHERE segment IN ({gone})")

    def removed(self) -> list[SegmentName]:
        """The segments whose files may be there, and count for nothing."""
        found = self._all("SELECT number, seed FROM segments WHERE committed = ?", _REMOVED)
        return [SegmentName(*row) for row in found]

    def forget_removed(self) -> None:
        """The files are gone, and stay so after a power cut; part of a transaction."""
        self._db.execute("DELETE FROM segments WHERE committed = ?", (_REMOVED,))

    # Refused records

    def add_conflict(self, record: FleetRecord) -> None:
        """Keep a refused record, and the newest of them only; part of a transaction."""
        values = (record.robot, record.epoch, record.seq, record.encoded)
        self._db.execute("INSERT INTO conflicts VALUES (NULL, ?, ?, ?, ?)", values)
        self._db.execute("DELETE FROM conflicts WHERE id <= (SELECT max(id) FROM conflicts) - ?", (_CONFLICTS,))

    def conflicts(self) -> list[bytes]:
        """The refused records that are kept, encoded, oldest first."""
        return [row[0] for row in self._all("SELECT record FROM conflicts ORDER BY id")]
