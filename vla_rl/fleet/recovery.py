"""Opening a ledger: after a crash its segments and its index are made to agree."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path

from vla_rl.contract import wire
from vla_rl.contract.errors import UserError
from vla_rl.fleet import segments
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.index import Head, Index, Row
from vla_rl.fleet.record import Sender, decode

log = logging.getLogger("vla_rl.fleet")
INDEX = "index.sqlite"


def recover(folder: Path, disk: Disk) -> tuple[Index, dict[Sender, Head]]:
    """The index of the ledger in ``folder``, in agreement with its segments, and where every sender is.

    Records that are whole in a segment but not in the index were never acknowledged; they are taken up, after a sync.
    What follows the first damaged byte behind them is cut off.  A lost or damaged index is made anew from all segments.
    """
    _make_folder(folder, disk)
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
    _finish_removing(index, folder, disk)
    known, found = index.segments(), segments.names(disk, folder)
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
            found = segments.parse(place.name, disk.read(folder / str(place.name), place.start, place.length))
            if found is not None and found.position == place.position:
                index.damage(place.position, damaged=False)


def _finish_removing(index: Index, folder: Path, disk: Disk) -> None:
    leaving, found = index.removed(), segments.names(disk, folder)
    for name in leaving:
        if name in found:
            disk.remove(folder / str(name))
    if leaving:
        disk.sync_folder(folder)
        with index.transaction():
            index.forget_removed()


def _make_folder(folder: Path, disk: Disk) -> None:
    if not disk.is_folder(folder):
        _make_folder(folder.parent, disk)
        disk.make_folder(folder)
    disk.sync_folder(folder.parent)  # also of a folder that is there: the process that made it may have been killed


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
            "the index of the ledger in %s is damaged (%s), so it is set aside as %s and made anew from the segments; "
            "consumers go back to where they were when the newest segment began.",
            *(folder, error, aside),
        )
    for name in disk.names(folder):
        if name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            disk.rename(folder / name, folder / name.replace(INDEX, aside))
    return Index(disk, path)


def _take_up(catching_up: _CatchUp, path: Path, name: segments.Name, committed: int, disk: Disk) -> None:
    size = disk.size(path)
    if size < committed:
        log.error(
            "%s ends after %d of %d bytes, so records in it cannot be read; look at the disk.", path, size, committed
        )
    if size <= committed:
        return
    data = disk.read(path)
    end = catching_up.segment(path, name, data, committed)
    file = disk.open(path)
    try:
        if end < size:
            file.truncate(end)
        file.sync()  # a killed process may have left it in memory only, and it is acknowledged from now on
    finally:
        file.close()


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
        self._heads, self._cursors = index.heads(), index.cursors()
        self._position = index.last_position()
        self._rows: list[tuple[Row, bool]] = []
        self._segments: dict[segments.Name, int] = {}

    def segment(self, path: Path, name: segments.Name, data: bytes, committed: int) -> int:
        """Take up what is whole in ``data`` behind ``committed``; returns where the segment ends now."""
        end = committed
        for found in segments.scan(name, data, committed):
            if isinstance(found, segments.Damage):
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

    def _frame(self, name: segments.Name, found: segments.Frame) -> bool:
        """Whether the frame belongs where it is."""
        self._position = max(self._position, found.position)
        if found.type == segments.HEADS:
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
        if self.rebuilding:
            self._cursors |= wire.unpack(body)["consumers"]

    def commit(self) -> None:
        """Write it all into the index; part of a transaction."""
        for row, again in self._rows:
            if again:
                self._index.forget(row.record.sender, row.record.seq, row.record.last)
            self._index.add([row])
        self._index.set_heads(self._heads)
        for name, end in self._segments.items():
            self._index.set_segment(name, end)
        for consumer, position in self._cursors.items():
            self._index.set_cursor(consumer, position)
        self._index.set_last_position(self._position)
