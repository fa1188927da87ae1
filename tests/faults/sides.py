"""The processes of the fleet: a server with its ledger and its learner, and robots with their spools.

Each is told by its board when to die; who is killed comes back on the same folder.  A process whose disk failed ends
by itself (``FAILED``), as a service does that is started again.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.faults import stand_in
from tests.faults.board import LEARNER_POINTS, ROBOT_POINTS, SERVER_POINTS, Board, BoardClock, CrashDisk, quiet
from tests.faults.known import fields_of
from tests.faults.learner import PIPES, learner
from tests.fleet.fleets import MemoryPolicies
from vla_rl.contract.errors import UserError
from vla_rl.fleet import server as fleet_server
from vla_rl.fleet.disk import Disk, StoreEndedError
from vla_rl.fleet.identity import Revoked, load_credentials
from vla_rl.fleet.ledger import Ledger, Receipt
from vla_rl.fleet.link import Link, LinkOptions
from vla_rl.fleet.page import Status
from vla_rl.fleet.protocol import BackoffOptions
from vla_rl.fleet.record import FleetRecord, Sender
from vla_rl.fleet.server import LearnerProcess
from vla_rl.fleet.spool import Spool, SpoolOptions
from vla_rl.fleet.transport import FleetTransport, TransportOptions

FAILED = 3  # exit code: the disk failed
BACKLOG = 400  # records that a robot makes before it waits for acknowledgements
SEGMENT_BYTES = 64 << 10
T = TypeVar("T")
_QUICK = BackoffOptions(first_s=0.02, longest_s=0.1)
_SILENCE = {"silence_s": 1.5, "heartbeat_s": 0.3}


class _Store:
    """A ledger that ends its process when it ends, and in which the process may die."""

    def __init__(self, ledger: Ledger, board: Board) -> None:
        self._ledger, self._board = ledger, board

    def append(self, records: Sequence[FleetRecord]) -> Receipt:
        self._board.reach("before append")
        try:
            receipt = self._ledger.append(records)
        except StoreEndedError:
            os._exit(FAILED)
        self._board.reach("before acknowledgement")
        return receipt

    def durable(self, robot: str, epoch: str) -> int:
        return self._ledger.durable(robot, epoch)

    def senders(self) -> Mapping[Sender, object]:
        return self._ledger.senders()


def server(folder: Path, board_at: Path, certificates: Path, port: int) -> None:
    """Serve the ledger in ``folder``, and a learner, until the board says stop."""
    quiet(folder)
    board = Board(board_at)
    ledger = _or_fail(lambda: Ledger(folder, CrashDisk(board), reserve=1 << 20, segment_bytes=SEGMENT_BYTES))
    credentials, revoked = load_credentials(certificates / "server", "server"), Revoked(None)
    options = TransportOptions(port=0, **_SILENCE)
    transport = FleetTransport(
        _Store(ledger, board), MemoryPolicies(), options, credentials, revoked, clock=BoardClock(board)
    )
    setattr(fleet_server, "BackoffOptions", lambda: _QUICK)  # noqa: B010  # a learner is started again at once
    command = (sys.executable, "-I", "-S", stand_in.__file__, str(folder.parent / PIPES))
    learning = LearnerProcess(command, ledger, Status())
    board["port"] = transport.port
    while not board["stop"]:
        board["alarms"], board["position"] = len(transport.alarms), ledger.position
        time.sleep(0.02)
    learning.close()
    transport.close()
    ledger.close()


def robot(folder: Path, board_at: Path, certificates: Path, port: int) -> None:
    """Make records, as many as are wanted, and bring them to the server at ``port``, until the board says stop."""
    quiet(folder)
    board = Board(board_at)
    name = certificates.name
    spool = _or_fail(lambda: WatchedSpool(folder, name, CrashDisk(board), board))
    folder.with_suffix(".epoch").write_text(spool.epoch, encoding="ascii")
    options = LinkOptions(address=f"127.0.0.1:{port}", backoff=_QUICK, batch_kb=64, **_SILENCE)
    link = Link(spool, options, load_credentials(certificates, "robot"), clock=BoardClock(board))
    made = spool.next_seq  # records are numbered in the order in which they are put, dropped ones too
    while not board["stop"]:
        if not board["quiet"] and made - board["acknowledged"] < BACKLOG:
            board.reach("before put")
            spool.put(**fields_of(spool.robot, spool.epoch, made))
            board.reach("after put")
            made += 1
        board["appended"] = max(board["appended"], spool.next_seq)
        board["dropped"] = spool.dropped[1]
        board["told"] |= "new spool" in link.status().notice
        time.sleep((4 + board["pause_ms"]) / 1e3)
    link.close()
    spool.close()


def _or_fail(make: Callable[[], T]) -> T:
    try:
        return make()
    except (UserError, OSError):
        logging.getLogger("vla_rl.fleet").exception("the disk failed")
        os._exit(FAILED)


@dataclass(frozen=True)
class Kind:
    """A process that can be killed: its program and the points at which it dies."""

    program: Callable[[Path, Path, Path, int], None]
    points: Sequence[str]


KINDS: Mapping[str, Kind] = {
    "server": Kind(server, SERVER_POINTS),
    "robot": Kind(robot, ROBOT_POINTS),
    "learner": Kind(learner, LEARNER_POINTS),
}


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
