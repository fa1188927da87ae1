"""The ledger: an append-only store of records, the same on a robot and on the server.

A record is acknowledged when its frame and its row in the index survive a power cut.  It is stored once, however often
it is sent, in the order of its sequence numbers; a record that leaves a gap or contradicts what is stored is refused.
After a crash, segments and index are made to agree when the ledger is opened.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.disk import (
    HEADS,
    RECORD,
    Damage,
    Disk,
    Frame,
    Segment,
    SegmentName,
    StoreEndedError,
    StoreFullError,
    frame_head,
    parse_frame,
    ran_out,
    read_frame,
    scan_frames,
    segment_names,
)
from vla_rl.fleet.index import Head, Index, Place, Row, Span
from vla_rl.fleet.record import FleetRecord, Sender, decode

log = logging.getLogger("vla_rl.fleet")
SEGMENT_BYTES = 64 << 20  # a segment that is this large is followed by the next
RESERVE = 256 << 20  # bytes that the ledger leaves free on its disk
INDEX = "index.sqlite"


class RefusedError(ContractError):
    """A record that the ledger did not take; ``expected`` is the sequence number that it would take."""

    def __init__(self, record: FleetRecord, expected: int, why: str) -> None:
        super().__init__(f"robot {record.robot!r} sent record {record.seq} of epoch {record.epoch[:8]}{why}")
        self.record, self.expected = record, expected


class GapError(RefusedError):
    """A record came before the one that it follows."""

    def __init__(self, record: FleetRecord, expected: int) -> None:
        why = f" where {expected} is the next, so it is not stored; send from {expected} on."
        super().__init__(record, expected, why)


class ConflictError(RefusedError):
    """A record that contradicts what is stored: another one has its number, or it follows another one."""

    def __init__(self, record: FleetRecord, expected: int, what: str) -> None:
        cure = "look for two robots of one name, or a spool that was copied or set back."
        super().__init__(record, expected, f", {what}, so it is set aside; {cure}")


@dataclass(frozen=True)
class Receipt:
    """What became of a batch.

    ``durable``: of every sender in it, the last sequence number that survives a power cut; -1 for none.
    ``refused``: of a sender, the first record that was not taken; what it sent behind it was not looked at.
    """

    durable: Mapping[Sender, int]
    refused: Mapping[Sender, RefusedError] = field(default_factory=dict)


class Ledger:
    """The records in ``folder``, for one process and any of its threads.

    ``reserve``: bytes that are left free on the disk.  Raises UserError when another process has the folder open, and
    OSError when the disk fails.
    """

    def __init__(
        self, folder: Path, disk: Disk | None = None, *, reserve: int = RESERVE, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.folder, self._disk, self._reserve, self._segment_bytes = folder, disk or Disk(), reserve, segment_bytes
        self._lock = threading.RLock()
        self._ended, self._closed = "", False
        self._rolled = False
        self._index, self._heads = _recover(folder, self._disk)
        self._segment: Segment | None = None
        self.position = self._index.last_position()  # of the newest record; 0 before the first

    def append(self, records: Sequence[FleetRecord]) -> Receipt:
        """Store a batch; when this returns, what it reports as durable survives a power cut.

        One batch costs one sync of the segment and one of the index, whatever its size.  Raises StoreFullError when
        there is no room (then nothing was stored) and StoreEndedError when the disk failed.
        """
        with self._use():
            fresh, heads, refused = self._judge(records)
            if fresh:
                if (size := sum(len(record.encoded) for record in fresh)) > self.room():
                    raise StoreFullError(
                        f"{size} bytes do not fit into {self.folder}, of which {self._reserve} bytes stay free, so "
                        "they are not stored; free space on the disk, and send them again."
                    )
                self._store(fresh, heads)
            if aside := [error.record for error in refused.values() if isinstance(error, ConflictError)]:
                with self._commit():
                    for record in aside:
                        self._index.add_conflict(record)
            durable = {record.sender: self.durable(*record.sender) for record in records}
            return Receipt(durable, refused)

    def give_up(self, dropped: FleetRecord) -> None:
        """Store ``dropped`` in place of the stored records that it stands for; the reserve may be used for it.

        It gets a segment of its own.  What the others took on the disk is free after :meth:`trim`.
        """
        with self._use():
            self.roll()
            self._store([dropped], {}, replaced=dropped)
            self.roll()

    def roll(self) -> None:
        """Have the next record begin a segment, so that those before can be removed without it."""
        with self._lock:
            self._rolled = True

    def trim(self, sender: Sender, seq: int) -> None:
        """Remove the segments that hold nothing but records of ``sender`` up to ``seq``, or ones that it gave up."""
        with self._use():
            with self._commit():
                self._index.remove_segments(sender, seq, self._segment.name if self._segment else None)
            with self._written(None):
                _remove_files(self._index, self.folder, self._disk)

    def spans(self, sender: Sender) -> list[Span]:
        """The records of ``sender`` that are here, together as they are in episodes and segments."""
        with self._use():
            return self._index.spans(sender)

    def hash_at(self, sender: Sender, last: int) -> bytes | None:
        """The hash of the record of ``sender`` that ends with ``last``, which may be damaged; None if it is gone."""
        with self._use():
            return self._index.hash_at(sender, last)

    def durable(self, robot: str, epoch: str) -> int:
        """The last sequence number of (robot, epoch) that is stored; -1 for none."""
        return self.head(robot, epoch).last

    def head(self, robot: str, epoch: str) -> Head:
        """The last stored sequence number of (robot, epoch), and that record's hash."""
        with self._lock:
            return self._heads.get(Sender(robot, epoch), Head())

    def senders(self) -> dict[Sender, Head]:
        with self._lock:
            return dict(self._heads)

    def read(self, after: int, count: int, max_bytes: int = 64 << 20) -> list[tuple[int, FleetRecord]]:
        """Up to ``count`` records behind position ``after`` (0: from the beginning) with their positions, in order.

        At least one record where there is one, and no more when ``max_bytes`` of them are together.  A damaged record
        is left out, noted in :meth:`damaged` and logged.  Raises OSError for one that cannot be read now; one that
        cannot for a minute is damaged, until it can when the ledger is opened again.
        """
        with self._use():
            found: list[tuple[int, FleetRecord]] = []
            while not found and (places := self._index.after(after, count)):
                found = [(place.position, record) for place, record in self._load(places, max_bytes)]
                after = places[-1].position
            return found

    def sent_by(self, sender: Sender, seq: int, count: int, max_bytes: int = 64 << 20) -> list[FleetRecord]:
        """Up to ``count`` records of ``sender`` from sequence number ``seq`` on, by number; as :meth:`read`."""
        with self._use():
            return [record for _, record in self._load(self._index.of(sender, seq, count), max_bytes)]

    def damaged(self) -> list[int]:
        """The positions of the records that cannot be read any more, because the disk changed them."""
        with self._use():
            return [place.position for place in self._index.set_aside()]

    def conflicts(self) -> list[FleetRecord]:
        """The newest of the records that were refused because they contradict what is stored."""
        with self._use():
            return [decode(data) for data in self._index.conflicts()]

    def room(self) -> int:
        """Bytes that fit before the reserve is reached: what a sender may be given credit for."""
        return max(0, self._disk.free(self.folder) - self._reserve)

    @property
    def failed(self) -> str:
        """Why it takes and gives nothing until :meth:`reopen`; "" while it does, and when it was closed."""
        return "" if self._closed else self._ended

    def reopen(self) -> None:
        """Open it again where its disk failed; raises UserError or OSError while the disk still fails."""
        with self._lock:
            if not self.failed:
                return
            if self._segment is not None:
                # What a failed sync left in memory may never reach the disk, though the next sync says it did.
                self._segment.cut(self._segment.synced)
            self._release()
            self._index, self._heads = _recover(self.folder, self._disk)
            self.position = self._index.last_position()
            self._ended = ""
            log.warning("the ledger in %s is open again", self.folder)

    def close(self) -> None:
        """Release the folder; everything that was acknowledged is on the disk already."""
        with self._lock:
            self._ended, self._closed = self._ended or "it was closed", True
            self._release()

    def _release(self) -> None:
        if self._segment is not None:
            with suppress(OSError):  # what counts is synced
                self._segment.close()
            self._segment = None
        self._index.close()

    def _judge(
        self, records: Sequence[FleetRecord]
    ) -> tuple[list[FleetRecord], dict[Sender, Head], dict[Sender, RefusedError]]:
        """The records that are new, where their senders are behind them, and whom something was refused."""
        fresh: list[FleetRecord] = []
        heads: dict[Sender, Head] = {}
        refused: dict[Sender, RefusedError] = {}
        batch: dict[tuple[Sender, int], bytes] = {}
        for record in records:
            sender = record.sender
            if sender in refused:
                continue
            head = heads.get(sender) or self._heads.get(sender, Head())
            stored = None
            if record.last <= head.last:
                stored = batch.get((sender, record.last)) or self._index.hash_at(sender, record.last)
            try:
                new = _follows(record, head, stored)
            except RefusedError as error:
                log.warning("%s", error)
                refused[sender] = error
                continue
            if new is not None:
                fresh.append(new)
                heads[sender] = Head(new.last, new.hash)
                batch[sender, new.last] = new.hash
        return fresh, heads, refused

    def _store(
        self, records: Sequence[FleetRecord], heads: Mapping[Sender, Head], replaced: FleetRecord | None = None
    ) -> None:
        segment = self._current()
        frames = [self._snapshot(segment.name)] if segment.end == 0 else []
        start, rows = segment.end + sum(map(len, frames)), list[Row]()
        for position, record in enumerate(records, self.position + 1):
            frames += (frame_head(segment.name, position, RECORD, record.encoded), record.encoded)
            size = len(frames[-2]) + len(record.encoded)
            rows.append(Row(position, segment.name.number, start, size, record))
            start += size
        with self._written(segment):
            segment.write(b"".join(frames))
            try:
                segment.sync()
            except OSError as error:  # also of a full disk: what a failed sync left behind is not known
                raise self._end(error) from error
            with self._index.transaction():
                if replaced is not None:
                    self._index.forget(replaced.sender, replaced.seq, replaced.last)
                self._index.add(rows)
                self._index.set_heads(heads)
                self._index.set_segment(segment.name, segment.end)
                self._index.set_last_position(rows[-1].position)
        self._index.remember_senders()
        self._heads.update(heads)
        self.position = rows[-1].position

    def _current(self) -> Segment:
        """The segment to write to; a new one is in the index before anything is in it."""
        if self._segment is not None and (self._rolled or self._segment.end >= self._segment_bytes):
            self._segment.close()
            self._segment = None
        self._rolled = False
        if self._segment is None:
            with self._written(None):
                names = segment_names(self._disk, self.folder)
                number = max([0, *self._index.segments(), *(name.number for name in names)]) + 1
                segment = Segment(self._disk, self.folder, number)
                with ExitStack() as undo:
                    undo.callback(segment.close)
                    with self._index.transaction():
                        self._index.set_segment(segment.name, 0)
                    undo.pop_all()
                self._segment = segment
        return self._segment

    def _snapshot(self, name: SegmentName) -> bytes:
        """The first frame of a segment: where everybody is."""
        heads = [[*sender, *head] for sender, head in self._heads.items()]
        body = wire.pack({"senders": heads, "consumers": {}})  # there are none any more
        return frame_head(name, self.position, HEADS, body) + body

    @contextmanager
    def _written(self, segment: Segment | None) -> Iterator[None]:
        """Nothing of the block is left when something ran out; the ledger ends when the disk fails."""
        end = 0 if segment is None else segment.end
        try:
            yield
        except (OSError, sqlite3.Error, MemoryError) as error:
            if not ran_out(error):
                raise self._end(error) from error
            try:
                if segment is not None:
                    segment.cut(end)
            except OSError as second:
                raise self._end(second) from second
            raise StoreFullError(
                f"{self.folder} takes nothing now ({error or type(error).__name__}), so the records are not stored; "
                "free space on its disk, or what else ran out, and send them again."
            ) from error

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Nobody else uses it meanwhile; it ends when its index fails."""
        with self._lock:
            if self._ended:
                raise StoreEndedError(
                    f"the ledger in {self.folder} takes and gives nothing, because {self._ended}; open it again."
                )
            try:
                yield
            except sqlite3.Error as error:
                raise self._end(error) from error

    @contextmanager
    def _commit(self) -> Iterator[None]:
        with self._written(None), self._index.transaction():
            yield

    def _load(self, places: Sequence[Place], max_bytes: int) -> Iterator[tuple[Place, FleetRecord]]:
        for i, place in enumerate(places):
            max_bytes -= place.length
            if i and max_bytes < 0:
                return
            try:
                data = read_frame(self._disk, self.folder / str(place.name), place.start, place.length)
            except OSError:
                if i:
                    return  # those before it first
                raise
            found = parse_frame(place.name, data)
            if found is not None and found.position == place.position:
                yield place, decode(found.body)
            else:
                self._tell_damage(place)

    def _tell_damage(self, place: Place) -> None:
        log.error(
            "the record at position %d cannot be read from bytes %d to %d of %s, which the disk changed, so it is left "
            "out; replace the disk, and look for the record on its robot.",
            *(place.position, place.start, place.start + place.length, self.folder / str(place.name)),
        )
        with self._commit():
            self._index.damage(place.position)

    def _end(self, error: Exception) -> StoreEndedError:
        """End the ledger: after a failed write or sync nobody knows what is on the disk."""
        self._ended = f"its disk failed ({type(error).__name__}: {error})"
        log.error("the ledger in %s ends: %s; look at the disk, then open it again.", self.folder, self._ended)
        return StoreEndedError(
            f"the ledger in {self.folder} takes nothing more, because {self._ended}; look at the disk, then open it "
            "again."
        )


def _follows(record: FleetRecord, head: Head, stored: bytes | None) -> FleetRecord | None:
    """``record``, or what of it is new behind ``head``; None for a duplicate.

    ``stored``: the hash of the record that ends where this one does, None when it is not there any more.
    """
    if record.seq > head.last + 1:
        raise GapError(record, head.last + 1)
    if record.last <= head.last:
        if stored is not None and stored != record.hash:
            raise ConflictError(record, head.last + 1, "but has another record of this number")
        return None
    if record.seq <= head.last:
        return record.after(head.last, head.hash)
    if record.previous != head.hash:
        raise ConflictError(record, head.last + 1, f"but it does not follow the stored record {head.last}")
    return record


# -- opening: after a crash, segments and index are made to agree


def _recover(folder: Path, disk: Disk) -> tuple[Index, dict[Sender, Head]]:
    """The index of the ledger in ``folder``, in agreement with its segments, and where every sender is.

    Records that are whole in a segment but not in the index were never acknowledged; they are taken up, after a sync.
    What follows the first damaged byte behind them is cut off.  A lost or damaged index is made anew from all segments.
    """
    disk.make_folders(folder)
    index = _open_index(folder, disk)
    try:
        _agree(index, folder, disk)
        return index, index.heads()
    except sqlite3.Error as error:
        index.close()
        raise _unopened(folder, error) from error
    except BaseException:
        index.close()
        raise


def _agree(index: Index, folder: Path, disk: Disk) -> None:
    _remove_files(index, folder, disk)
    known, found = index.segments(), segment_names(disk, folder)
    for name, _ in known.values():
        if name not in found:
            log.error(
                "the segment %s is gone, so its records cannot be read; look for who removed it.", folder / str(name)
            )
    catching_up = _CatchUp(index)
    for name in found:
        catching_up.rebuilding = name.number not in known
        _, committed = known.get(name.number, (name, 0))
        _take_up(catching_up, folder / str(name), name, committed, disk)
    with index.transaction():
        catching_up.commit()
        _try_again(index, folder, disk)
    index.remember_senders()


def _try_again(index: Index, folder: Path, disk: Disk) -> None:
    """Take back the records that could not be read, and can be now; part of a transaction."""
    for place in index.set_aside():
        with suppress(OSError):
            found = parse_frame(place.name, disk.read(folder / str(place.name), place.start, place.length))
            if found is not None and found.position == place.position:
                index.damage(place.position, damaged=False)


def _remove_files(index: Index, folder: Path, disk: Disk) -> None:
    """Remove the segments that count for nothing, also those that a killed process has left."""
    if leaving := index.removed():
        for name in sorted({*leaving} & {*segment_names(disk, folder)}):
            disk.remove(folder / str(name))
        disk.sync_folder(folder)
        with index.transaction():
            index.forget_removed()


def _open_index(folder: Path, disk: Disk) -> Index:
    path = folder / INDEX
    try:
        return Index(disk, path)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise UserError(
                f"{folder} is in use by another process, so it is not opened; stop that one first."
            ) from error
        raise _unopened(folder, error) from error
    except sqlite3.DatabaseError as error:
        aside = f"{INDEX}.damaged"
        log.error(
            "the index of the ledger in %s is damaged (%s), so it is set aside as %s and made anew from the segments.",
            *(folder, error, aside),
        )
    for name in disk.names(folder):
        if name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            disk.rename(folder / name, folder / name.replace(INDEX, aside))
    return Index(disk, path)


def _take_up(catching_up: _CatchUp, path: Path, name: SegmentName, committed: int, disk: Disk) -> None:
    size = disk.size(path)
    if size < committed:
        log.error(
            "%s ends after %d of %d bytes, so records in it cannot be read; look at the disk.", path, size, committed
        )
    if size <= committed:
        return
    data = disk.read(path)
    end = catching_up.segment(path, name, data, committed)
    with closing(disk.open(path)) as file:
        if end < size:
            file.truncate(end)
        file.sync()  # a killed process may have left it in memory only, and it is acknowledged from now on


def _unopened(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"the ledger in {folder} cannot be opened ({error}), so nothing is read from it; look at the disk, and whether "
        "it is full."
    )


class _CatchUp:
    """Rows and heads for records that the index does not have.

    ``rebuilding``: the index does not know the segment, so it was lost (a segment is in the index before anything is in
    it), and what was acknowledged is not known; whatever is whole is kept.
    """

    rebuilding = False

    def __init__(self, index: Index) -> None:
        self._index = index
        self._heads, self._position = index.heads(), index.last_position()
        self._rows: list[tuple[Row, bool]] = []
        self._segments: dict[SegmentName, int] = {}

    def segment(self, path: Path, name: SegmentName, data: bytes, committed: int) -> int:
        """Take up what is whole in ``data`` behind ``committed``; returns where the segment ends now."""
        end = committed
        for found in scan_frames(name, data, committed):
            if isinstance(found, Damage):
                if found.last or not self.rebuilding:
                    log.warning("%d bytes of an unfinished write at the end of %s are cut off.", len(data) - end, path)
                    break
                log.error("bytes %d to %d of %s are damaged and left out.", found.start, found.end, path)
            elif not self._frame(name, found):
                log.warning("%d bytes of an abandoned write at the end of %s are cut off.", len(data) - end, path)
                break
            else:
                end = found.end
        self._segments[name] = end
        return end

    def _frame(self, name: SegmentName, found: Frame) -> bool:
        self._position = max(self._position, found.position)
        if found.type == HEADS:
            self._snapshot(found.body)
            return True
        record = decode(found.body)
        head = self._heads.get(record.sender, Head())
        if record.seq > head.last + 1 and not self.rebuilding:
            return False
        row = Row(found.position, name.number, found.start, found.end - found.start, record)
        self._rows.append((row, record.seq <= head.last))
        if record.last > head.last:
            self._heads[record.sender] = Head(record.last, record.hash)
        return True

    def _snapshot(self, body: bytes) -> None:
        """Where everybody was when a segment began, which counts where the index knows less."""
        for robot, epoch, last, digest in wire.unpack(body)["senders"]:
            if last > self._heads.get(Sender(robot, epoch), Head()).last:
                self._heads[Sender(robot, epoch)] = Head(last, digest)

    def commit(self) -> None:
        """Write it all into the index; part of a transaction."""
        for row, again in self._rows:
            if again:
                self._index.forget(row.record.sender, row.record.seq, row.record.last)
            self._index.add([row])
        self._index.set_heads(self._heads)
        for name, end in self._segments.items():
            self._index.set_segment(name, end)
        self._index.set_last_position(self._position)
