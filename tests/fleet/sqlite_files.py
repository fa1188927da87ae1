"""SQLite's own file access, seen and refused by a test: a VFS of the library that Python uses.

SQLite reaches files through a table of functions (a VFS).  Ours is a copy of the default one, in which opening,
writing, truncating, syncing and removing first ask a ``Watcher``; everything else goes to the default.  Syncs are not
passed on: what survives is the watcher's business.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Protocol

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


class Watcher(Protocol):
    """Each raises OSError for what is refused, and PowerCut when there is no power."""

    def created(self, path: Path) -> None: ...
    def wrote(self, path: Path, offset: int, data: bytes) -> None: ...
    def truncated(self, path: Path, size: int) -> None: ...
    def synced(self, path: Path) -> None: ...
    def synced_names(self, folder: Path) -> None: ...
    def removed(self, path: Path) -> None: ...


class PowerCut(BaseException):
    """There is no power any more; nobody may catch it."""


class _Known:
    def __init__(self, watcher: Watcher, path: Path, new_log: bool) -> None:
        self.watcher, self.path, self.new_log = watcher, path, new_log


class _Vfs:
    """Registered once, for all watchers; ``watchers``: by the folder that holds the databases."""

    def __init__(self) -> None:
        self.watchers: dict[Path, Watcher] = {}
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

    def _watcher(self, path: Path) -> Watcher:
        return next(self.watchers[folder] for folder in path.parents if folder in self.watchers)

    def _open(self, vfs: int, name: bytes | None, file: int, flags: int, out: object) -> int:
        path = Path(os.fsdecode(name)) if name else None
        new = path is not None and not path.exists() and bool(flags & _OPEN_CREATE)
        if path is not None and new:
            code = _refused(lambda: self._watcher(path).created(path), CANTOPEN)
            if code:
                ctypes.c_uint64.from_address(file).value = 0
                return code
        code = self._inner_open(self._default, name, file, flags, out)
        if code == 0 and path is not None:
            self._files[file] = _Known(self._watcher(path), path, new and bool(flags & _OPEN_WAL))
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
                return _refused(lambda: known.watcher.wrote(known.path, offset, content), IOERR_WRITE) or write(
                    file, data, size, offset
                )

            def watched_truncate(file: int, size: int) -> int:
                known = self._files[file]
                return _refused(lambda: known.watcher.truncated(known.path, size), IOERR_WRITE) or truncate(file, size)

            functions = (_Write(watched_write), _Truncate(watched_truncate), _Sync(self._sync))
            self._keep.extend(functions)
            for i, function in enumerate(functions):
                table[3 + i] = ctypes.cast(function, c_void_p).value or 0
            self._tables[address] = table
        return self._tables[address]

    def _sync(self, file: int, flags: int) -> int:
        known = self._files[file]
        code = _refused(lambda: known.watcher.synced(known.path), IOERR_FSYNC)
        if code == 0 and known.new_log:  # SQLite syncs the folder of a new log with the log's first sync
            known.new_log = False
            code = _refused(lambda: known.watcher.synced_names(known.path.parent), IOERR_FSYNC)
        return code

    def _delete(self, vfs: int, name: bytes, sync: int) -> int:
        path = Path(os.fsdecode(name))
        if path.exists() and (code := _refused(lambda: self._watcher(path).removed(path), IOERR_WRITE)):
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
