"""``python -m tests.fleet.load [MINUTES] [CLIENTS]``: a server under the load of a hundred robots on one machine.

Each client sends ten records of 15 kB a second over mutual TLS, and the server syncs before it acknowledges.  Prints
how long an acknowledgement takes (from the moment when the record is due, so that a client that is late counts), by how
much the server's memory grows after the first fifth of the time, and the highest rate at which 99 % are acknowledged
within a second.  Writes ``runs/load/summary.json``.  Clients share the processor with the server, so run nothing
beside it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.fleet.fleets import MemoryPolicies
from vla_rl.fleet.identity import Authority, load_credentials
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.link import Link, LinkOptions
from vla_rl.fleet.record import NO_HASH, FleetRecord
from vla_rl.fleet.transport import FleetTransport, TransportOptions

CLIENTS, PROCESSES, RATE, BYTES, MINUTES = 100, 4, 10.0, 15_000, 10.0
SUMMARY = Path("runs/load/summary.json")
LIMIT_S = 1.0  # for 99 % of acknowledgements, at the highest rate
_STEP_S, _FACTOR = 20.0, 1.25  # of the search for that rate


class Waiting:
    """A robot's records in memory until they are acknowledged; ``took``: the seconds until then, of all its process."""

    def __init__(self, robot: str, took: list[float], payload: bytes) -> None:
        self.robot, self.epoch, self.first_seq, self.next_seq = robot, uuid.uuid4().hex, 0, 0
        self._took, self._payload, self._previous = took, payload, NO_HASH
        self._held = deque[tuple[FleetRecord, float]]()
        self._more = threading.Condition()

    def put(self, due: float) -> None:
        seq = self.next_seq
        given: Any = {"kind": "step", "episode": "e", "task": "load", "payload": self._payload}
        record = FleetRecord(robot=self.robot, epoch=self.epoch, seq=seq, previous=self._previous, **given)
        self._previous = record.hash
        with self._more:
            self._held.append((record, due))
            self.next_seq = seq + 1
            self._more.notify_all()

    def unacknowledged(self, seq: int, max_bytes: int) -> list[FleetRecord]:
        with self._more:
            start = seq - self.first_seq
            count = max(1, max_bytes // len(self._payload))
            return [self._held[i][0] for i in range(start, min(start + count, len(self._held)))]

    def acknowledged(self, seq: int) -> None:
        now = time.monotonic()
        with self._more:
            while self._held and self.first_seq <= seq:
                self._took.append(now - self._held.popleft()[1])
                self.first_seq += 1

    def wait(self, seq: int, seconds: float) -> bool:
        with self._more:
            return self._more.wait_for(lambda: self.next_seq > seq, seconds)


def serve(folder: Path, certificates: Path, clients: int, pipe: Connection) -> None:
    """The server's process: until the pipe says something."""
    ledger = Ledger(folder)
    options = TransportOptions(port=0, max_robots=clients + 8)
    credentials = load_credentials(certificates / "server", "server")
    with closing(ledger), closing(FleetTransport(ledger, MemoryPolicies(), options, credentials)) as server:
        pipe.send(server.port)
        pipe.recv()


def send(certificates: Path, names: Sequence[str], port: int, rate: float, pipe: Connection) -> None:
    """A process of clients: each puts so many records a second; for a new rate the pipe gets what took how long."""
    took: list[float] = []
    sources = [Waiting(name, took, random.Random(names[0]).randbytes(BYTES)) for name in names]
    options = LinkOptions(address=f"127.0.0.1:{port}")
    links = [
        Link(source, options, load_credentials(certificates / "robots" / source.robot, "robot")) for source in sources
    ]
    due = [time.monotonic() + random.Random(name).random() for name in names]
    while rate:
        if pipe.poll(0.002):
            rate, count = pipe.recv(), len(took)
            pipe.send(took[:count])
            del took[:count]
        now = time.monotonic()
        for i, source in enumerate(sources):
            while rate and due[i] <= now:
                source.put(due[i])
                due[i] += 1 / rate
    for link in links:
        link.close()


class Load:
    """A server and its clients; ``measure`` looks at them for some seconds."""

    def __init__(self, folder: Path, clients: int, rate: float) -> None:
        authority = Authority.create(folder / "certificates")
        names = [f"robot-{i}" for i in range(clients)]
        for name in names:
            authority.robot(name)
        self._context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.server = self._start(serve, folder / "ledger", authority.folder, clients)
        port = self._pipes[0].recv()
        self._clients = [self._start(send, authority.folder, names[i::PROCESSES], port, rate) for i in range(PROCESSES)]

    def _start(self, program: Any, *given: Any) -> Any:
        here, there = self._context.Pipe()
        process = self._context.Process(target=program, args=(*given, there), daemon=True)
        process.start()
        self._pipes.append(here)
        return process

    def _ask(self, rate: float) -> np.ndarray:
        """Seconds of the acknowledgements since the last question; from now on clients send at ``rate``."""
        for pipe in self._pipes[1:]:
            pipe.send(rate)
        return np.concatenate([pipe.recv() for pipe in self._pipes[1:]])

    def measure(self, seconds: float, rate: float) -> tuple[np.ndarray, list[tuple[float, float]]]:
        """How long acknowledgements took (s), and the server's memory (s, MB), every second."""
        self._ask(rate)
        start, memory = time.monotonic(), []
        while (now := time.monotonic() - start) < seconds:
            memory.append((now, resident_mb(self.server.pid)))
            time.sleep(min(1.0, seconds - now))
        return self._ask(rate), memory

    def close(self) -> None:
        for process, pipe in zip((*self._clients, self.server), (*self._pipes[1:], self._pipes[0]), strict=True):
            pipe.send(0.0)
            process.join(30)
            process.kill()


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def within(took: np.ndarray, share: float) -> float:
    """Seconds within which ``share`` of the acknowledgements came; infinite without any."""
    return float(np.quantile(took, share)) if len(took) else math.inf


def slope(memory: Sequence[tuple[float, float]], after: float) -> float:
    """MB per minute, by least squares."""
    seconds, mb = np.array([sample for sample in memory if sample[0] >= after]).T
    return float(60 * np.polyfit(seconds, mb, 1)[0])


def load(folder: Path, minutes: float, clients: int, step_s: float = _STEP_S) -> dict[str, Any]:
    """The summary of one run."""
    running = Load(folder, clients, RATE)
    try:
        running.measure(min(10.0, 6 * minutes), RATE)  # connections are made
        took, memory = running.measure(60 * minutes, RATE)
        found = {
            "clients": clients,
            "records_per_s": round(len(took) / (60 * minutes), 1),
            "wanted_per_s": clients * RATE,
            "p50_ms": round(1e3 * within(took, 0.5), 1),
            "p99_ms": round(1e3 * within(took, 0.99), 1),
            "server_mb": round(memory[-1][1], 1),
            "mb_per_minute": round(slope(memory, 12 * minutes), 2),
            "seconds": round(60 * minutes, 1),
        }
        print(json.dumps(found), flush=True)
        return found | highest(running, clients, step_s)
    finally:
        running.close()


def highest(running: Load, clients: int, step_s: float) -> dict[str, Any]:
    """The highest rate that is kept with 99 % within ``LIMIT_S``, each step held for a while."""
    rate, best, p99 = RATE, 0.0, 0.0
    while True:
        running.measure(step_s / 4, rate)
        took, _ = running.measure(step_s, rate)
        reached, late = len(took) / step_s, within(took, 0.99)
        print(f"{rate * clients:.0f} records/s wanted, {reached:.0f} acknowledged, p99 {late:.3f} s", flush=True)
        if late >= LIMIT_S or reached < 0.9 * rate * clients:
            return {"highest_per_s": round(best, 1), "highest_p99_ms": round(1e3 * p99, 1)}
        best, p99 = reached, late
        rate *= _FACTOR


def main(given: Sequence[str]) -> int:
    """Run, print and write the summary."""
    minutes, clients = (float(given[0]) if given else MINUTES), (int(given[1]) if len(given) > 1 else CLIENTS)
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="load-", dir=SUMMARY.parent))
    before = os.getloadavg()[0]
    try:
        found = load(folder, minutes, clients) | {"load_before": round(before, 1)}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found, indent=2))
    SUMMARY.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
