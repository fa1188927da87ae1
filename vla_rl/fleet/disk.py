"""The one small object through which a ledger reaches its files, so that a test can put a worse disk in its place."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Protocol

# Not on macOS, where neither call is enough to survive a power cut.
_flush = getattr(os, "fdatasync", os.fsync)


class File(Protocol):
    """A file that grows at its end."""

    def write(self, data: bytes, /) -> int:
        """Append the beginning of ``data``; returns how many bytes were taken, which may be fewer than given."""

    def truncate(self, size: int, /) -> None:
        """Cut the file to its first ``size`` bytes; what is written next follows them."""

    def sync(self) -> None:
        """Return when everything written survives a power cut.  The file's name may not: see ``sync_folder``."""

    def close(self) -> None:
        """Release the file, without a sync."""


class Disk(Protocol):
    """Folders and files; every method raises OSError for what the disk refuses."""

    def make_folder(self, folder: Path) -> None:
        """Make ``folder`` in a folder that is there; its name may not survive a power cut: see ``sync_folder``."""

    def is_folder(self, path: Path) -> bool:
        """Whether there is a folder at ``path``."""

    def names(self, folder: Path) -> list[str]:
        """What is in ``folder``, sorted."""

    def open(self, path: Path) -> File:
        """The file at ``path``, made empty when there is none; what is written is appended."""

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``start`` on, or to the end of the file; fewer where it ends before."""

    def size(self, path: Path) -> int:
        """The bytes in the file at ``path``."""

    def rename(self, path: Path, target: Path) -> None:
        """Give the file another name in its folder."""

    def remove(self, path: Path) -> None:
        """Remove the file."""

    def sync_folder(self, folder: Path) -> None:
        """Return when the names of the files in ``folder`` survive a power cut."""

    def free(self, folder: Path) -> int:
        """Bytes that are left for files in ``folder``."""

    def database(self, path: Path) -> sqlite3.Connection:
        """A connection to the SQLite database at ``path``, without transactions of Python's own."""


class RealDisk:
    """The disk of this machine."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir()

    def is_folder(self, path: Path) -> bool:
        return path.is_dir()

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def open(self, path: Path) -> File:
        return _RealFile(path)

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(-1 if length is None else length) or b""

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def rename(self, path: Path, target: Path) -> None:
        os.replace(path, target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def free(self, folder: Path) -> int:
        room = os.statvfs(folder)
        return room.f_bavail * room.f_frsize

    def database(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)


class _RealFile:
    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes, /) -> int:
        return os.write(self._handle, data)

    def truncate(self, size: int, /) -> None:
        os.ftruncate(self._handle, size)

    def sync(self) -> None:
        _flush(self._handle)

    def close(self) -> None:
        os.close(self._handle)
