"""Rounds: in each one process is killed, at a named point or at a random moment, and comes back."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.audit import Claim, audit, flip
from tests.faults.board import OPENING
from tests.faults.fleet import Fleet, Process
from tests.faults.sides import KINDS
from tests.faults.trouble import TROUBLE, calm
from vla_rl.fleet.record import Sender

AT_RANDOM = ""  # in place of a point
REACH_S = 2.0  # for a process to come to a point where it dies
PROGRESS = 150  # records that are acknowledged in a round, after the kill
OPENINGS = ("sync", "folder sync", "commit", "create")  # what opening does
FLIPS = 20


@dataclass
class Tally:
    """What was done."""

    rounds: int = 0
    in_flight: int = 0  # rounds with records that were not acknowledged yet
    missed: Counter[str] = field(default_factory=Counter)  # rounds whose point was not reached: killed at random
    hits: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    trouble: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # processes that ended because their disk failed


def plan(rounds: int, each: int, draw: random.Random) -> list[tuple[str, str]]:
    """(kind, point) of ``rounds`` rounds: every point of each kind ``each`` times, the others at random moments."""
    named = [(kind, point) for kind, made in KINDS.items() for point in made.points for _ in range(each)]
    draw.shuffle(named)
    others = [(draw.choice(list(KINDS)), AT_RANDOM) for _ in range(max(0, rounds - len(named)))]
    chosen = named[:rounds] + others
    draw.shuffle(chosen)
    return chosen


class Rounds:
    """Runs rounds on a fleet that has been started."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self.fleet, self.draw, self.tally = fleet, draw, Tally()

    def run(self, kind: str, point: str, trouble: str) -> bool:
        """One round, and another kill while it comes back in some; whether ``point`` was reached."""
        if trouble:
            TROUBLE[trouble](self.fleet, self.draw)
            self.tally.trouble[trouble] += 1
            time.sleep(self.draw.uniform(0.0, 0.1))
        self._mend()
        victim = self.fleet.server if kind == "server" else self.draw.choice(self.fleet.robots)
        if point in OPENING:
            hit = self._kill(victim, "within write")
            self._start(victim, point)
            hit = self._died_at(victim, point, REACH_S)
        else:
            hit = self._kill(victim, point)
        if point != AT_RANDOM and not hit:
            self.tally.missed[f"{kind} {point}"] += 1
        calm(self.fleet)
        self._come_back(victim)
        return hit

    def _kill(self, victim: Process, point: str) -> bool:
        """Kill ``victim``; whether it was at ``point``."""
        if point == AT_RANDOM:
            time.sleep(self.draw.expovariate(1 / 0.1))
            victim.kill()
            self._count(victim, AT_RANDOM)
            return True
        victim.board.arm(point, self.draw.choice((0, 0, self.draw.randrange(20))))
        if self._died_at(victim, point, 0.5):
            return True
        calm(self.fleet)
        if self._died_at(victim, point, REACH_S):
            return True
        victim.kill()
        self._count(victim, AT_RANDOM)
        return False

    def _died_at(self, victim: Process, point: str, seconds: float) -> bool:
        if not victim.ended(seconds) or not victim.was_killed or victim.board["armed"]:
            return False
        self._count(victim, point)
        return True

    def _count(self, victim: Process, point: str) -> None:
        self.tally.rounds += 1
        self.tally.in_flight += any(one.behind for one in self.fleet.robots)
        self.tally.hits[victim.kind][point or "random moment"] += 1

    def _come_back(self, victim: Process) -> None:
        """Start it again, in some rounds to die while it opens; records arrive again."""
        if self.draw.random() < 0.25:
            point = f"{self.draw.choice(('before', 'after'))} {self.draw.choice(OPENINGS)}"
            self._start(victim, point)
            self._died_at(victim, point, 0.3)
        if victim.ended():
            self._start(victim)
        victim.board.arm("none")
        before = sum(one.board["acknowledged"] for one in self.fleet.robots)
        self.fleet.until(lambda: self._arrived(before), "records arrive again")

    def _arrived(self, before: int) -> bool:
        self._mend()
        return sum(one.board["acknowledged"] for one in self.fleet.robots) >= before + PROGRESS

    def _start(self, process: Process, point: str = "") -> None:
        if process is self.fleet.server:
            self.fleet.start_server(point)
        else:
            process.start(point)

    def _mend(self) -> None:
        """Start again who ended because its disk failed."""
        for process in (self.fleet.server, *self.fleet.robots):
            if process.ended():
                self.tally.failed += 1
                calm(self.fleet)
                self._start(process)


def run(folder: Path, rounds: int, each: int, say: Callable[[str], None], seed: int = 0) -> dict[str, Any]:
    """The summary of ``rounds`` rounds on a new fleet below ``folder``, each point hit ``each`` times where it fits."""
    start, draw = time.monotonic(), random.Random(seed)
    with _started(Fleet(folder)) as fleet:
        running = Rounds(fleet, draw)
        for number, _ in enumerate(_until_hit(plan(rounds, each, draw), running, draw), 1):
            if number % 50 == 0:
                made = sum(one.board["acknowledged"] for one in fleet.lives)
                say(f"{running.tally.rounds} kills, {made} records, {time.monotonic() - start:.0f} s")
    return _summary(fleet, running.tally, draw) | {"seconds": round(time.monotonic() - start, 1)}


def play(folder: Path, rounds: Sequence[tuple[str, str, str]], robots: int) -> dict[str, Any]:
    """The summary of these rounds: (kind, point, trouble) of each."""
    with _started(Fleet(folder, robots)) as fleet:
        running = Rounds(fleet, random.Random(0))
        for kind, point, trouble in rounds:
            running.run(kind, point, trouble)
    return _summary(fleet, running.tally, random.Random(0))


@contextmanager
def _started(fleet: Fleet) -> Iterator[Fleet]:
    """All processes run, and in the end everything that robots made is at the server."""
    try:
        fleet.start()
        yield fleet
        fleet.drain()
    finally:
        fleet.close()


def _until_hit(chosen: list[tuple[str, str]], running: Rounds, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Run the rounds; a point that was not reached gets another round."""
    left, again = list(reversed(chosen)), Counter[tuple[str, str]]()
    while left:
        kind, point = left.pop()
        trouble = draw.choice((*TROUBLE, *[""] * len(TROUBLE)))
        if not running.run(kind, point, trouble) and again[kind, point] < 10:
            again[kind, point] += 1
            left.insert(0, (kind, point))
        yield kind, point


def _summary(fleet: Fleet, tally: Tally, draw: random.Random) -> dict[str, Any]:
    claims = []
    for one in fleet.lives:
        epoch = one.folder.with_suffix(".epoch")
        if epoch.exists():
            sender = Sender(one.name, epoch.read_text(encoding="ascii"))
            must = one.board["acknowledged" if one.gone else "appended"]
            claims.append(Claim(sender, one.board["acknowledged"], must))
    found = audit(fleet.server.folder, claims)
    count = min(FLIPS, found.stored)  # of records, dropped ones too
    told, others = flip(fleet.server.folder, fleet.folder / "flipped", count, draw)
    return {
        "rounds": tally.rounds,
        "hits": {kind: dict(sorted(hits.items())) for kind, hits in tally.hits.items()},
        **asdict(found),
        "in_flight": tally.in_flight,
        "missed": dict(tally.missed),
        "trouble": dict(tally.trouble),
        "failed_disks": tally.failed,
        "replaced_robots": sum(one.gone for one in fleet.lives),
        "flipped_bits": {"records": count, "told": told, "others_lost": others},
    }
