"""A ledger's files: the one small object through which they are reached, and the segments that records lie in.

A test puts a worse disk in the place of :class:`Disk`.

A segment is frames one behind the other, each with a checksum, so that a torn or changed one is noticed.  A frame is
magic, CRC-32, length, position, type and body.  The CRC (zlib's, over everything behind it) starts from the segment's
seed, a random number in the file's name: what a robot puts into a payload cannot pass for a frame, because the robot
does not know the seed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import sync

RECORD, HEADS = 0, 1  # what a frame holds: a record; where all senders were when the segment began
PATIENCE_S = 60.0  # with a disk that cannot read something
_failing: dict[tuple[Path, int], float] = {}  # what this process cannot read, and since when
_MAGIC = b"vseg"
_CHECKED = struct.Struct("<IQB")  # length of the body, position, type
_HEAD = struct.Struct("<4sI")  # magic, CRC-32
FRAME_BYTES = _HEAD.size + _CHECKED.size
_NAME = re.compile(r"(\d{10})-([0-9a-f]{8})\.seg")
WRITING = ".writing"  # suffix of what is not whole yet
_RAN_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Not on macOS, where neither call is enough to survive a power cut.
_flush = getattr(os, "fdatasync", os.fsync)


class StoreFullError(UserError):
    """There is no room for a record (``ran_out``); nothing of the batch was stored, and the ledger goes on."""


class StoreEndedError(UserError):
    """The disk failed, so the ledger takes and acknowledges nothing more until it is opened again."""


def ran_out(error: Exception) -> bool:
    """Whether room, open files or memory ran out: nothing of the disk is broken, and it may work in a moment."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _RAN_OUT)


class File:
    """A file that grows at its end, made empty when there is none; raises OSError for what the disk refuses."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes, /) -> int:
        """Append the beginning of ``data``; returns how many bytes were taken, which may be fewer than given."""
        return os.write(self._handle, data)

    def write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(bytes(rest) if len(rest) < len(data) else data) :]

    def truncate(self, size: int, /) -> None:
        """Cut the file to its first ``size`` bytes; what is written next follows them."""
        os.ftruncate(self._handle, size)

    def sync(self) -> None:
        """Return when everything written survives a power cut.  The file's name may not: see ``sync_folder``."""
        _flush(self._handle)

    def close(self) -> None:
        """Release the file, without a sync."""
        os.close(self._handle)


class Disk:
    """Folders and files of this machine; every method raises OSError for what the disk refuses."""

    def make_folder(self, folder: Path) -> None:
        """Make ``folder`` in a folder that is there; its name may not survive a power cut: see ``sync_folder``."""
        folder.mkdir()

    def is_folder(self, path: Path) -> bool:
        return path.is_dir()

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def open(self, path: Path) -> File:
        return File(path)

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``start`` on, or to the end of the file; fewer where it ends before."""
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(-1 if length is None else length) or b""

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def rename(self, path: Path, target: Path) -> None:
        """Give the file another name in its folder."""
        os.replace(path, target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, folder: Path) -> None:
        """Return when the names of the files in ``folder`` survive a power cut."""
        sync(folder)

    def free(self, folder: Path) -> int:
        """Bytes that are left for files in ``folder``."""
        room = os.statvfs(folder)
        return room.f_bavail * room.f_frsize

    def database(self, path: Path) -> sqlite3.Connection:
        """A connection to the SQLite database at ``path``, without transactions of Python's own."""
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)

    # What is made of these

    def make_folders(self, folder: Path) -> None:
        """Make ``folder`` and its parents; their names survive a power cut."""
        if not self.is_folder(folder):
            self.make_folders(folder.parent)
            self.make_folder(folder)
        self.sync_folder(folder.parent)  # also of a folder that is there: who made it may have been killed before

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a file so that it is there whole or not at all; its name survives a power cut after ``sync_folder``."""
        writing = path.with_name(path.name + WRITING)
        with closing(self.open(writing)) as file:
            file.truncate(0)
            file.write_all(data)
            file.sync()
        self.rename(writing, path)


class SegmentName(NamedTuple):
    """A segment's number, which counts up, and the seed of its checksums."""

    number: int
    seed: int

    def __str__(self) -> str:
        return f"{self.number:010d}-{self.seed:08x}.seg"


class Frame(NamedTuple):
    """A frame that is whole: where it starts and ends in its file, and what it holds."""

    start: int
    end: int
    position: int
    type: int
    body: bytes


class Damage(NamedTuple):
    """Bytes from ``start`` to ``end`` that are no whole frame; ``last``: no whole frame follows them."""

    start: int
    end: int
    last: bool


def segment_names(disk: Disk, folder: Path) -> list[SegmentName]:
    """The segments in ``folder``, oldest first."""
    found = (_NAME.fullmatch(name) for name in disk.names(folder))
    return sorted(SegmentName(int(match[1]), int(match[2], 16)) for match in found if match)


def frame_head(name: SegmentName, position: int, kind: int, body: bytes) -> bytes:
    """What precedes ``body`` in its frame: large ones are not copied for it."""
    checked = _CHECKED.pack(len(body), position, kind)
    return _HEAD.pack(_MAGIC, zlib.crc32(body, zlib.crc32(checked, name.seed))) + checked


def parse_frame(name: SegmentName, data: bytes, start: int = 0) -> Frame | None:
    """The frame at ``start`` of ``data``; None when there is no whole one."""
    behind = start + FRAME_BYTES
    if behind > len(data):
        return None
    magic, crc = _HEAD.unpack_from(data, start)
    length, position, kind = _CHECKED.unpack_from(data, start + _HEAD.size)
    if magic != _MAGIC or behind + length > len(data):
        return None
    if zlib.crc32(memoryview(data)[start + _HEAD.size : behind + length], name.seed) != crc:
        return None
    return Frame(start, behind + length, position, kind, data[behind : behind + length])


def scan_frames(name: SegmentName, data: bytes, start: int = 0) -> Iterator[Frame | Damage]:
    """Every whole frame of ``data`` from ``start`` on, and the bytes between them that are damaged."""
    while start < len(data):
        found = parse_frame(name, data, start)
        if found is None:
            found = _next_frame(name, data, start + 1)
            yield Damage(start, found.start if found else len(data), found is None)
        if found is None:
            return
        yield found
        start = found.end


def _next_frame(name: SegmentName, data: bytes, start: int) -> Frame | None:
    while (start := data.find(_MAGIC, start)) >= 0:
        if found := parse_frame(name, data, start):
            return found
        start += 1
    return None


def read_frame(disk: Disk, path: Path, start: int, length: int) -> bytes:
    """What ``disk`` has there of a segment; nothing when it is gone, or could not be read for ``PATIENCE_S``.

    Raises OSError before, so that it is tried again.
    """
    try:
        data = disk.read(path, start, length)
    except OSError as error:
        gone = error.errno == errno.ENOENT and disk.is_folder(path.parent)
        since = _failing.setdefault((path, start), time.monotonic())
        if gone or (error.errno == errno.EIO and time.monotonic() - since > PATIENCE_S):
            return b""
        raise
    _failing.pop((path, start), None)
    return data


class Segment:
    """The segment that is written; a new file, whose name survives a power cut before anything is in it."""

    def __init__(self, disk: Disk, folder: Path, number: int) -> None:
        self.name = SegmentName(number, secrets.randbits(32))
        self._file: File = disk.open(folder / str(self.name))
        try:
            disk.sync_folder(folder)
        except OSError:
            self._file.close()
            raise
        self.end = self.synced = 0

    def write(self, data: bytes) -> None:
        self._file.write_all(data)
        self.end += len(data)

    def sync(self) -> None:
        """Return when everything written survives a power cut."""
        self._file.sync()
        self.synced = self.end

    def cut(self, end: int) -> None:
        """Forget what is written behind ``end``, so that it does not come back after a power cut."""
        self._file.truncate(end)
        self.end = end
        self.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
