"""A robot's spool, of which the board knows what was acknowledged."""

from __future__ import annotations

from pathlib import Path

from tests.faults.board import Board
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.spool import Spool, SpoolOptions

# So little that a robot whose server is away drops episodes.
OPTIONS = SpoolOptions(quota_mb=0.5, reserve_mb=1, queue_mb=0.5)


class WatchedSpool(Spool):
    def __init__(self, folder: Path, robot: str, disk: Disk, board: Board) -> None:
        self._board = board
        super().__init__(folder, robot, OPTIONS, disk)

    def acknowledged(self, seq: int) -> None:
        self._board["acknowledged"] = max(self._board["acknowledged"], seq + 1)
        self._board.reach("before acknowledged")
        super().acknowledged(seq)
        self._board.reach("after acknowledged")
