"""A robot's records on its disk."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

from tests.faults.board import Board
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord, Sender


class SpoolSource:
    def __init__(self, folder: Path, robot: str, disk: Disk, board: Board) -> None:
        self._board = board
        self._ledger = Ledger(folder, disk, reserve=0, segment_bytes=16 << 10)
        senders = list(self._ledger.senders())
        self.robot, self.epoch = senders[0] if senders else (robot, uuid.uuid4().hex)
        self._sender, self._more = Sender(self.robot, self.epoch), threading.Condition()
        self.first_seq = 0

    @property
    def next_seq(self) -> int:
        return self._ledger.durable(*self._sender) + 1

    def put(self, fields: dict[str, Any]) -> None:
        head = self._ledger.head(*self._sender)
        record = FleetRecord(robot=self.robot, epoch=self.epoch, seq=head.last + 1, previous=head.hash, **fields)
        self._ledger.append([record])
        with self._more:
            self._more.notify_all()

    def unacknowledged(self, seq: int, max_bytes: int) -> list[FleetRecord]:
        return self._ledger.sent_by(self._sender, seq, 512, max_bytes)

    def acknowledged(self, seq: int) -> None:
        self._board["acknowledged"] = max(self._board["acknowledged"], seq + 1)
        self._board.reach("before acknowledged")
        self._board.reach("after acknowledged")

    def wait(self, seq: int, seconds: float) -> bool:
        with self._more:
            return self._more.wait_for(lambda: self.next_seq > seq, seconds)

    def close(self) -> None:
        self._ledger.close()
