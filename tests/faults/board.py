"""What a process and its tormentor tell each other: numbers in a file that both map, which no kill loses."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from vla_rl.fleet.disk import Disk, File
from vla_rl.fleet.protocol import Clock


def around(*steps: str) -> tuple[str, ...]:
    """The points before and after each of ``steps``."""
    return tuple(f"{when} {step}" for step in steps for when in ("before", "after"))


DISK = ("create", "write", "sync", "folder sync", "truncate")
REPLACING = "within replacing a state"  # reached only by a learner that saves twice at one step
# Where a process can be killed: around each step of its disk, within a write, and around what it says and hears.
SERVER_POINTS = (*around(*DISK, "commit"), "within write", "before append", "before acknowledgement")
ROBOT_POINTS = (*around(*DISK, "commit", "remove", "put", "acknowledged"), "within write")
# A learner takes the record that ends an episode, learns, publishes (a checkpoint; chunks, a manifest and a line of
# history in the registry; a trial; the oldest version is removed) and saves its state.
LEARNER_POINTS = (
    *around("episode", "updates", "checkpoint", "manifest", "line of history"),
    *("after publication", "after trial", "after removing old versions"),
    *(*around("write", "sync", "folder sync", "rename", "remove"), "within write"),
    *(*around("state"), "within state", "before naming a state", "within removing a state", REPLACING),
)
FREQUENT = (*around(*DISK, "commit", "episode", "updates", "rename"), "within write")  # else once a publication
POINTS = ("none", *dict.fromkeys((*SERVER_POINTS, *ROBOT_POINTS, *LEARNER_POINTS)))
OPENING = ("before truncate", "after truncate")  # of a server and a robot: only when opening what a kill left half
SLOTS = (
    *("armed", "skip", "failing", "full", "ahead_ms", "wall_ms", "stop", "quiet", "pause_ms"),  # by the tormentor
    *("port", "appended", "acknowledged", "dropped", "told", "alarms", "failures"),  # by the process
    *("position", "began", "taken", "saved", "saves"),  # of the ledger: by the server, and by the learner
)


class Board:
    """The numbers called ``SLOTS``, each written by one side."""

    def __init__(self, path: Path) -> None:
        size = 8 * len(SLOTS)
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")

    def __getitem__(self, name: str) -> int:
        return int(self._words[SLOTS.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self._words[SLOTS.index(name)] = value

    def arm(self, point: str, skip: int = 0) -> None:
        """Let the process die when it is at ``point`` for the time after ``skip`` others."""
        self["armed"], self["skip"] = 0, skip
        self["armed"] = POINTS.index(point)

    def reach(self, point: str) -> None:
        """Die here when the point is armed; a failing disk fails before its step."""
        if self["armed"] and POINTS[self["armed"]] == point:
            if self["skip"]:
                self["skip"] -= 1
            else:
                self["armed"] = 0
                os.kill(os.getpid(), signal.SIGKILL)
        if self["failing"] and POINTS[self["failing"]] == point:
            self["failing"] = 0
            self["failures"] += 1
            raise OSError(errno.EIO, f"the test's disk, {point}")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """The points before and after a step."""
        self.reach(f"before {name}")
        yield
        self.reach(f"after {name}")


class BoardClock(Clock):
    """The machine's clock, as far ahead as the board says."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def now(self) -> float:
        return super().now() + self._board["ahead_ms"] / 1e3

    def wall_ns(self) -> int:
        return super().wall_ns() + self._board["wall_ms"] * 1_000_000


def quiet(folder: Path) -> None:
    """What the process says goes into a file beside its folder."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(message)s")


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
