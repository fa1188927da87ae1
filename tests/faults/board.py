"""What a process and its tormentor tell each other: numbers in a file that both map, which no kill loses."""

from __future__ import annotations

import errno
import mmap
import os
import signal
from pathlib import Path

from vla_rl.fleet.clock import SystemClock

STEPS = ("create", "write", "sync", "folder sync", "truncate", "commit", "remove")
AROUND = tuple(f"{when} {step}" for step in STEPS for when in ("before", "after"))
# Where a process can be killed: around each step of its disk, within a write, and around what it says and hears.
SERVER_POINTS = (*AROUND[:-2], "within write", "before append", "before acknowledgement")
ROBOT_POINTS = (*AROUND, "within write", "before put", "after put", "before acknowledged", "after acknowledged")
POINTS = ("none", *dict.fromkeys((*SERVER_POINTS, *ROBOT_POINTS)))
OPENING = ("before truncate", "after truncate")  # reached only when opening what was left by a kill within a write
SLOTS = (
    *("armed", "skip", "failing", "full", "ahead_ms", "wall_ms", "stop", "quiet"),  # by the tormentor
    *("port", "appended", "acknowledged", "dropped", "told", "alarms", "failures"),  # by the process
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


class BoardClock(SystemClock):
    """The machine's clock, as far ahead as the board says."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def now(self) -> float:
        return super().now() + self._board["ahead_ms"] / 1e3

    def wall_ns(self) -> int:
        return super().wall_ns() + self._board["wall_ms"] * 1_000_000
