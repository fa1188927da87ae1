"""Segment files: frames one behind the other, each with a checksum, so that a torn or changed one is noticed.

A frame is magic, CRC-32, length, position, type and body.  The CRC (zlib's, over everything behind it) starts from the
segment's seed, a random number in the file's name: what a robot puts into a payload cannot pass for a frame, because
the robot does not know the seed.
"""

from __future__ import annotations

import errno
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vla_rl.fleet.disk import Disk, File

RECORD, HEADS = 0, 1  # what a frame holds: a record; where all senders and consumers were when the segment began
PATIENCE_S = 60.0  # with a disk that cannot read something
_failing: dict[tuple[Path, int], float] = {}  # what this process cannot read, and since when
_MAGIC = b"vseg"
_CHECKED = struct.Struct("<IQB")  # length of the body, position, type
_HEAD = struct.Struct("<4sI")  # magic, CRC-32
FRAME_BYTES = _HEAD.size + _CHECKED.size
_NAME = re.compile(r"(\d{10})-([0-9a-f]{8})\.seg")


class Name(NamedTuple):
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


def names(disk: Disk, folder: Path) -> list[Name]:
    """The segments in ``folder``, oldest first."""
    found = (_NAME.fullmatch(name) for name in disk.names(folder))
    return sorted(Name(int(match[1]), int(match[2], 16)) for match in found if match)


def frame(name: Name, position: int, kind: int, body: bytes) -> bytes:
    """One frame of the segment called ``name``."""
    return frame_head(name, position, kind, body) + body


def frame_head(name: Name, position: int, kind: int, body: bytes) -> bytes:
    """What precedes ``body`` in its frame: large ones are not copied for it."""
    checked = _CHECKED.pack(len(body), position, kind)
    return _HEAD.pack(_MAGIC, zlib.crc32(body, zlib.crc32(checked, name.seed))) + checked


def parse(name: Name, data: bytes, start: int = 0) -> Frame | None:
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


def scan(name: Name, data: bytes, start: int = 0) -> Iterator[Frame | Damage]:
    """Every whole frame of ``data`` from ``start`` on, and the bytes between them that are damaged."""
    while start < len(data):
        found = parse(name, data, start)
        if found is None:
            found = _next(name, data, start + 1)
            yield Damage(start, found.start if found else len(data), found is None)
        if found is None:
            return
        yield found
        start = found.end


def _next(name: Name, data: bytes, start: int) -> Frame | None:
    while (start := data.find(_MAGIC, start)) >= 0:
        if found := parse(name, data, start):
            return found
        start += 1
    return None


def read(disk: Disk, path: Path, start: int, length: int) -> bytes:
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
        self.name = Name(number, secrets.randbits(32))
        self._file: File = disk.open(folder / str(self.name))
        try:
            disk.sync_folder(folder)
        except OSError:
            self._file.close()
            raise
        self.end = self.synced = 0

    def write(self, data: bytes) -> None:
        """Append ``data``, all of it or OSError."""
        rest = memoryview(data)
        while rest:
            taken = self._file.write(bytes(rest) if len(rest) < len(data) else data)
            rest = rest[taken:]
            self.end += taken

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
