"""The machine's disk, on which a process dies or fails before, within and after every step."""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.faults.board import POINTS, Board
from vla_rl.fleet.disk import Disk, File


class CrashDisk(Disk):
    """Steps are told to ``board`` before and after; while it says full, there is no room."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def step(self, name: str) -> AbstractContextManager[None]:
        return self.board.step(name)

    def open(self, path: Path) -> File:
        if path.exists():
            return _CrashFile(self, super().open(path))
        with self.step("create"):
            return _CrashFile(self, super().open(path))

    def remove(self, path: Path) -> None:
        with self.step("remove"):
            super().remove(path)

    def rename(self, path: Path, target: Path) -> None:
        with self.step("rename"):
            super().rename(path, target)

    def sync_folder(self, folder: Path) -> None:
        with self.step("folder sync"):
            super().sync_folder(folder)

    def free(self, folder: Path) -> int:
        return 0 if self.board["full"] else super().free(folder)

    def database(self, path: Path) -> sqlite3.Connection:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if statement != "COMMIT":
                    return super().execute(statement, *values)
                with disk.step("commit"):
                    return super().execute(statement, *values)

        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0, factory=Connection)


class _CrashFile(File):
    def __init__(self, disk: CrashDisk, file: File) -> None:
        self._disk, self._file = disk, file

    def write(self, data: bytes, /) -> int:
        board = self._disk.board
        with self._disk.step("write"):
            if POINTS[board["armed"]] == "within write":
                half = self._file.write(data[: len(data) // 2])
                board.reach("within write")
                return half  # a short write, as disks may
            return self._file.write(data)

    def truncate(self, size: int, /) -> None:
        with self._disk.step("truncate"):
            self._file.truncate(size)

    def sync(self) -> None:
        with self._disk.step("sync"):
            self._file.sync()

    def close(self) -> None:
        self._file.close()
