"""A disk that loses power: whatever was not synced may be lost, in part or whole, in any combination.

SQLite reaches files through a table of functions (a VFS).  Ours is a copy of the default one, in which opening,
writing, truncating, syncing and removing first ask the disk; everything else goes to the default.  Syncs are not
passed on: what survives is the disk's business.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import os
import random
import sqlite3
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vla_rl.fleet.disk import Disk, File

FOLDER = -1  # in place of a file's number
SECTOR = 64  # bytes that are written together; real ones are larger, and a record of a test smaller


class Write(NamedTuple):
    offset: int
    data: bytes


class Truncate(NamedTuple):
    size: int


class Point(NamedTuple):
    """One thing that a program asked of the disk: the n-th, "write", "sync", ... and of which file."""

    number: int
    what: str
    name: str


class PowerCut(BaseException):
    """There is no power any more; nobody may catch it."""


Content = tuple[bytes, list[Write | Truncate]]


class TornDisk(Disk):
    """A disk below ``root``, whose files are real ones: what the operating system has in memory.

    ``before(point)`` is called before every change and every sync; it may raise OSError, or PowerCut by ``cut``.
    ``taken``: how many bytes of a write the disk takes at most, None for all.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.points = root, 0
        self.before: Callable[[Point], None] = lambda point: None
        self.taken: int | None = None
        self.room = 1 << 40
        self.identity_of_machine = "machine"
        self._off = False
        self._files: dict[int, Content] = {}
        self._names: dict[Path, int] = {}  # those in memory
        self._safe_names: dict[Path, int] = {}
        self._changed_names: list[tuple[Path | None, Path | None, int]] = []  # (old, new, file): not synced yet
        VFS.disks[root] = self

    # What the operating system is asked

    def make_folder(self, folder: Path) -> None:
        self._point("folder", folder)
        super().make_folder(folder)
        self._rename(None, folder, FOLDER)

    def open(self, path: Path) -> File:
        if not path.exists():
            self.created(path)
        return _TornFile(self, path, super().open(path))

    def rename(self, path: Path, target: Path) -> None:
        self._point("rename", path)
        super().rename(path, target)
        change = (path, target, self._names[path])
        _change(self._names, *change)
        self._changed_names.append(change)

    def remove(self, path: Path) -> None:
        self.removed(path)
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        self.synced_names(folder)

    def free(self, folder: Path) -> int:
        return self.room

    def database(self, path: Path) -> sqlite3.Connection:
        uri = f"{path.as_uri()}?vfs={NAME}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)

    # What is seen of it, also by SQLite's files

    def created(self, path: Path) -> None:
        self._point("create", path)
        number = max(self._files, default=0) + 1
        self._files[number] = (b"", [])
        self._rename(None, path, number)

    def wrote(self, path: Path, offset: int, data: bytes) -> None:
        self._point("write", path)
        self._files[self._names[path]][1].append(Write(offset, data))

    def truncated(self, path: Path, size: int) -> None:
        self._point("truncate", path)
        self._files[self._names[path]][1].append(Truncate(size))

    def synced(self, path: Path) -> None:
        self._point("sync", path)
        number = self._names[path]
        self._files[number] = (_applied(*self._files[number]), [])

    def synced_names(self, folder: Path) -> None:
        self._point("sync_folder", folder)
        here = [change for change in self._changed_names if folder in {p.parent for p in change[:2] if p}]
        self._changed_names = [change for change in self._changed_names if change not in here]
        for change in here:
            _change(self._safe_names, *change)

    def removed(self, path: Path) -> None:
        self._point("remove", path)
        self._rename(path, None, self._names.pop(path))

    def _rename(self, old: Path | None, new: Path | None, number: int) -> None:
        if new is not None:
            self._names[new] = number
        self._changed_names.append((old, new, number))

    def _point(self, what: str, path: Path) -> None:
        if self._off:
            raise PowerCut
        self.points += 1
        self.before(Point(self.points, what, path.name))

    def cut(self) -> None:
        """No power from now on."""
        self._off = True
        raise PowerCut

    def kill(self, close: Callable[[], None]) -> None:
        """The process ends without another word to the disk: ``close`` releases what it held."""
        self._off = True
        with contextlib.suppress(OSError, sqlite3.Error, PowerCut):
            close()
        self._off = False

    def adopt(self) -> None:
        """Take what is below ``root`` for files that were synced."""
        for number, path in enumerate(sorted(self.root.rglob("*"))):
            self._names[path] = self._safe_names[path] = FOLDER if path.is_dir() else number
            if path.is_file():
                self._files[number] = (path.read_bytes(), [])

    # What is left

    def left(self, target: Path, what: str, seed: int = 0) -> TornDisk:
        """A disk below ``target`` with what a power cut leaves of what was not synced: "nothing", "all", or "torn".

        Torn: any of the changes, and of a write any of its sectors, some of them rubbish.
        """
        chance = random.Random(seed)
        target.mkdir()
        disk, names = TornDisk(target), dict(self._safe_names)
        for change in self._changed_names:
            if _kept(what, chance):
                _change(names, *change)
        for path, number in sorted(names.items()):
            parents = [parent for parent in path.parents if self.root in parent.parents]
            if all(names.get(parent) == FOLDER for parent in parents):
                self._leave(disk, target / path.relative_to(self.root), number, what, chance)
        return disk

    def _leave(self, disk: TornDisk, path: Path, number: int, what: str, chance: random.Random) -> None:
        disk._names[path] = disk._safe_names[path] = number
        if number == FOLDER:
            path.mkdir()
            return
        content, changes = self._files[number]
        made = [part for change in changes if _kept(what, chance) for part in _torn(change, what, chance)]
        disk._files[number] = (_applied(content, made), [])
        path.write_bytes(disk._files[number][0])


class _TornFile(File):
    def __init__(self, disk: TornDisk, path: Path, file: File) -> None:
        self._disk, self._path, self._file = disk, path, file

    def write(self, data: bytes, /) -> int:
        data = data[: self._disk.taken]
        self._disk.wrote(self._path, self._path.stat().st_size, data)
        return self._file.write(data)

    def truncate(self, size: int, /) -> None:
        self._disk.truncated(self._path, size)
        self._file.truncate(size)

    def sync(self) -> None:
        self._disk.synced(self._path)

    def close(self) -> None:
        self._file.close()


def _change(names: dict[Path, int], old: Path | None, new: Path | None, number: int) -> None:
    """What is in a folder goes with it."""
    if old is not None and new is not None and number == FOLDER and names.get(old) == FOLDER:
        for path in [path for path in names if old in path.parents]:
            names[new / path.relative_to(old)] = names.pop(path)
    if old is not None and names.get(old) == number:
        del names[old]
    if new is not None:
        names[new] = number


def _kept(what: str, chance: random.Random) -> bool:
    return what == "all" or (what == "torn" and chance.random() < 0.5)


def _torn(change: Write | Truncate, what: str, chance: random.Random) -> list[Write | Truncate]:
    """What is made of a change: of a torn write any of its sectors, each of them right or rubbish."""
    if what != "torn" or isinstance(change, Truncate) or chance.random() < 0.3:
        return [change]
    found: list[Write | Truncate] = []
    sound = chance.choice((0.5, 0.8, 1.0))
    for start in range(0, len(change.data), SECTOR):
        data = change.data[start : start + SECTOR]
        if chance.random() > sound:
            data = chance.choice((bytes(len(data)), chance.randbytes(len(data))))
        if chance.random() < sound:
            found.append(Write(change.offset + start, data))
    return found


def _applied(content: bytes, changes: list[Write | Truncate]) -> bytes:
    found = bytearray(content)
    for change in changes:
        if isinstance(change, Truncate):
            del found[change.size :]
            found.extend(bytes(change.size - len(found)))
        else:
            found.extend(bytes(max(0, change.offset - len(found))))
            found[change.offset : change.offset + len(change.data)] = change.data
    return bytes(found)


NAME = "vla_rl_torn"
FULL, IOERR_WRITE, IOERR_FSYNC, CANTOPEN = 13, 10 | 3 << 8, 10 | 4 << 8, 14
_OPEN_CREATE, _OPEN_WAL = 0x4, 0x80000
_VFS_WORDS, _METHODS = 21, 19  # of sqlite3_vfs and sqlite3_io_methods, version 3
_APP_DATA_WORDS = 5  # the 8-byte words of sqlite3_vfs before its functions
_Open = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_int, POINTER(c_int))
_Delete = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)


@dataclass
class _Known:
    disk: TornDisk
    path: Path
    new_log: bool


class _Vfs:
    """Registered once, for all disks, by their roots."""

    def __init__(self) -> None:
        self.disks: dict[Path, TornDisk] = {}
        self._files: dict[int, _Known] = {}
        self._library = ctypes.CDLL(_sqlite3.__file__)  # its symbols are those of the SQLite that it is linked with
        find = self._library.sqlite3_vfs_find
        find.restype, find.argtypes = c_void_p, [c_char_p]
        self._default = find(None)
        words = (ctypes.c_uint64 * _VFS_WORDS).from_address(self._default)
        self._vfs = (ctypes.c_uint64 * _VFS_WORDS)(*words)
        self._name = ctypes.create_string_buffer(NAME.encode())
        self._vfs[2], self._vfs[3] = 0, ctypes.addressof(self._name)
        self._inner_open, self._inner_delete = _Open(words[_APP_DATA_WORDS]), _Delete(words[_APP_DATA_WORDS + 1])
        self._tables: dict[int, ctypes.Array[ctypes.c_uint64]] = {}
        self._keep: list[object] = [_Open(self._open), _Delete(self._delete)]
        for i, function in enumerate(self._keep):
            self._vfs[_APP_DATA_WORDS + i] = ctypes.cast(function, c_void_p).value or 0
        assert self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 0) == 0

    def _disk(self, path: Path) -> TornDisk:
        return next(self.disks[folder] for folder in path.parents if folder in self.disks)

    def _open(self, vfs: int, name: bytes | None, file: int, flags: int, out: object) -> int:
        path = Path(os.fsdecode(name)) if name else None
        new = path is not None and not path.exists() and bool(flags & _OPEN_CREATE)
        if path is not None and new:
            code = _refused(lambda: self._disk(path).created(path), CANTOPEN)
            if code:
                ctypes.c_uint64.from_address(file).value = 0
                return code
        code = self._inner_open(self._default, name, file, flags, out)
        if code == 0 and path is not None:
            self._files[file] = _Known(self._disk(path), path, new and bool(flags & _OPEN_WAL))
            methods = ctypes.c_uint64.from_address(file)
            methods.value = ctypes.addressof(self._table(methods.value))
        return code

    def _table(self, address: int) -> ctypes.Array[ctypes.c_uint64]:
        """The functions of an open file, ours among those at ``address``."""
        if address not in self._tables:
            words = (ctypes.c_uint64 * _METHODS).from_address(address)
            table = (ctypes.c_uint64 * _METHODS)(*words)
            write, truncate = _Write(words[3]), _Truncate(words[4])

            def watched_write(file: int, data: int, size: int, offset: int) -> int:
                known, content = self._files[file], ctypes.string_at(data, size)
                return _refused(lambda: known.disk.wrote(known.path, offset, content), IOERR_WRITE) or write(
                    file, data, size, offset
                )

            def watched_truncate(file: int, size: int) -> int:
                known = self._files[file]
                return _refused(lambda: known.disk.truncated(known.path, size), IOERR_WRITE) or truncate(file, size)

            functions = (_Write(watched_write), _Truncate(watched_truncate), _Sync(self._sync))
            self._keep.extend(functions)
            for i, function in enumerate(functions):
                table[3 + i] = ctypes.cast(function, c_void_p).value or 0
            self._tables[address] = table
        return self._tables[address]

    def _sync(self, file: int, flags: int) -> int:
        known = self._files[file]
        code = _refused(lambda: known.disk.synced(known.path), IOERR_FSYNC)
        if code == 0 and known.new_log:  # SQLite syncs the folder of a new log with the log's first sync
            known.new_log = False
            code = _refused(lambda: known.disk.synced_names(known.path.parent), IOERR_FSYNC)
        return code

    def _delete(self, vfs: int, name: bytes, sync: int) -> int:
        path = Path(os.fsdecode(name))
        if path.exists() and (code := _refused(lambda: self._disk(path).removed(path), IOERR_WRITE)):
            return code
        return self._inner_delete(self._default, name, 0)


def _refused(ask: Callable[[], None], code: int) -> int:
    try:
        ask()
    except PowerCut:
        return code
    except OSError as error:
        return FULL if error.errno == 28 else code
    return 0


VFS = _Vfs()
