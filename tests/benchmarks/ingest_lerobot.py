"""Steps from a robot's arrays to the learner's: ours against LeRobot's transport of transitions, over loopback.

Ours packs pictures as JPEG, stores every record in the ledger with a sync, and reads it back from there; LeRobot's own
code (0.4.4, in a process of its own) saves float32 tensors by ``torch.save`` and keeps them in memory.  Both are
one process with both ends, without TLS, which LeRobot has not.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import Contender, NotRun, Row, interleave, rate_row
from tests.benchmarks.vla_inference import INSTALL, PACKAGES, asked
from tests.fleet.fleets import MemoryPolicies, MemorySpool
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.link import Link, LinkOptions
from vla_rl.fleet.payloads import FleetStep
from vla_rl.fleet.transport import FleetTransport, TransportOptions

QUALITY, SIDE, STATE, ACTION = 90, 128, 18, 4  # LeRobot's pictures and sizes in its actor and learner
KEPT = 64  # different steps


def ingest_vs_lerobot(quick: bool = False) -> list[Row]:
    """Steps of two pictures of 128x128 per second, from the robot's arrays to the learner's.

    The second row is the server's part alone: steps are packed already, and count when they are on its disk; LeRobot's
    when they are tensors, since they are nowhere else.  Raises NotRun without LeRobot.
    """
    if not (PACKAGES / "lerobot").is_dir():
        raise NotRun(f"not run: LeRobot is not in .cache/lerobot; install it once with {INSTALL}")
    steps, length, repeats = (20, 10, 1) if quick else (400, 50, 5)
    with tempfile.TemporaryDirectory(prefix="vla-rl-ingest-", dir=".") as folder:
        given = _steps()
        path = Path(folder).resolve() / "steps.npz"
        np.savez(path, **given)
        program = (sys.executable, str(Path(__file__).with_name("lerobot_transitions.py")), str(steps), str(length))
        with asked(program, first=str(path)) as ask:
            ours = _Ours(Path(folder), given, steps)
            try:
                whole = interleave({"ours": Contender(ours.send), "other": Contender(ask("send"))}, repeats)
                packed = {"ours": Contender(ours.send_packed, ours.pack), "other": Contender(ask("packed"))}
                stored = interleave(packed, repeats)
            finally:
                ours.close()
    detail = {"steps": steps, "steps_per_episode": length, "bytes_per_step_ours": ours.bytes_per_step}
    return [
        rate_row(name, "ingest_vs_lerobot", steps, (seconds["ours"], seconds["other"]), "steps/s", **detail)
        for name, seconds in (("ingest_vs_lerobot", whole), ("ingest_vs_lerobot_packed", stored))
    ]


def _steps() -> dict[str, np.ndarray]:
    """Pictures that are smooth with some noise, as a camera's are."""
    draw = np.random.default_rng(0)
    given = {}
    for name in ("front", "wrist"):
        coarse = draw.integers(0, 256, (KEPT, 9, 9, 3)).astype(np.float32)
        at = np.linspace(0, 8, SIDE)
        low = np.minimum(at.astype(int), 7)
        part = (at - low)[:, None, None]
        rows = coarse[:, low] * (1 - part) + coarse[:, low + 1] * part
        part = (at - low)[:, None]
        smooth = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
        given[name] = np.clip(smooth + draw.normal(0, 3, smooth.shape), 0, 255).astype(np.uint8)
    numbers = {"state": (KEPT, STATE), "action": (KEPT, ACTION)}
    return given | {name: draw.normal(size=size).astype(np.float32) for name, size in numbers.items()}


class _Ours:
    """A server with its ledger and a robot that is connected."""

    def __init__(self, folder: Path, given: dict[str, np.ndarray], steps: int) -> None:
        self._given, self._steps, self._sent, self._position = given, steps, 0, 0
        self._ledger = Ledger(folder / "ledger")
        self._server = FleetTransport(self._ledger, MemoryPolicies(), TransportOptions(port=0))
        self._spool = MemorySpool()
        address = f"127.0.0.1:{self._server.port}"
        self._link = Link(self._spool, LinkOptions(address=address), draw=random.Random(0))
        self._packed: list[bytes] = []
        self.bytes_per_step = 0

    def send(self) -> None:
        robot = threading.Thread(target=self._record)
        robot.start()
        seen = 0
        while seen < self._steps:
            found = self._ledger.read(self._position, 64)
            if not found:
                time.sleep(0.002)
            for self._position, record in found:
                step = FleetStep.from_payload(record.payload)
                assert step.images["front"].shape == (SIDE, SIDE, 3)
                self.bytes_per_step = len(record.encoded)
            seen += len(found)
        robot.join()

    def pack(self) -> None:
        """What :meth:`send_packed` sends next; what was sent before is read."""
        self._position = self._ledger.position
        self._packed = [self._payload(i) for i in range(self._steps)]

    def send_packed(self) -> None:
        for payload in self._packed:
            self._spool.put(payload=payload)
        while self._ledger.position < self._position + self._steps:
            time.sleep(0.001)
        self._position = self._ledger.position

    def _record(self) -> None:
        for i in range(self._steps):
            self._spool.put(payload=self._payload(i))

    def _payload(self, i: int) -> bytes:
        i %= KEPT
        images = {name: self._given[name][i] for name in ("front", "wrist")}
        return FleetStep(images, self._given["state"][i], i, self._given["action"][i], {}).payload(QUALITY)

    def close(self) -> None:
        with closing(self._ledger), closing(self._server), closing(self._link):
            pass
