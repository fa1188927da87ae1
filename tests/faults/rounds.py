"""Rounds: in each one process is killed, at a named point or at a random moment, and comes back."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults.board import FREQUENT, OPENING, POINTS, REPLACING
from tests.faults.fleet import Fleet, Process
from tests.faults.sides import KINDS

AT_RANDOM = ""  # in place of a point
REACH_S = 2.0  # for a process to come to a point where it dies
PROGRESS = 150  # records that are acknowledged in a round, after the kill
OPENINGS = ("sync", "folder sync", "commit", "create")  # what opening does
IN_FLIGHT = {
    "server": "records that a robot has and the server has not acknowledged",
    "robot": "records that a robot has and the server has not acknowledged",
    "learner": "records that the server has stored and the learner's saved state does not include",
}


@dataclass
class Tally:
    """What was done."""

    rounds: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)  # rounds with records as ``IN_FLIGHT`` says, by kind
    missed: Counter[str] = field(default_factory=Counter)  # rounds whose point was not reached: killed at random
    hits: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    trouble: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # processes that ended because their disk failed
    replaced: int = 0  # robots


class Rounds:
    """Runs rounds on a fleet that has been started."""

    def __init__(self, fleet: Fleet, draw: random.Random, tally: Tally | None = None) -> None:
        self.fleet, self.draw, self.tally = fleet, draw, tally or Tally()

    def run(self, kind: str, point: str, trouble: str) -> bool:
        """One round, and another kill while it comes back in some; whether ``point`` was reached."""
        if trouble:
            TROUBLE[trouble](self.fleet, self.draw)
            self.tally.trouble[trouble] += 1
            time.sleep(self.draw.uniform(0.0, 0.1))
        self._mended()
        victim = self._victim(kind)
        for one in self.fleet.robots:  # rounds of a learner take longer, and it is sent all there is when it begins
            one.board["pause_ms"] = 20 if kind == "learner" else 0
        if point in OPENING and kind != "learner":
            hit = self._kill(victim, "within write")
            self.fleet.begin(victim, point)
            hit = self._died_at(victim, point, REACH_S)
        elif point == REPLACING:
            hit = self._kill_replacing()
        else:
            hit = self._kill(victim, point)
        if point != AT_RANDOM and not hit:
            self.tally.missed[f"{kind} {point}"] += 1
        calm(self.fleet)
        self._come_back(victim)
        return hit

    def _victim(self, kind: str) -> Process:
        one = {"server": self.fleet.server, "learner": self.fleet.learner}
        return one.get(kind) or self.draw.choice(self.fleet.robots)

    def _kill_replacing(self) -> bool:
        """Kill a learner while it saves once more at the step of its last state: two servers are killed before."""
        learner, server = self.fleet.learner, self.fleet.server
        calm(self.fleet)
        server.kill()
        if not learner.ended(REACH_S):  # it waits for the next server
            learner.kill()
        learner.start(REPLACING)
        self.fleet.start_server()
        self.fleet.until(lambda: learner.board["began"] or learner.ended() or server.ended(), "the learner begins")
        server.kill()
        hit = self._died_at(learner, REPLACING, REACH_S) or self._kill_anyhow(learner)
        self.fleet.start_server()
        return hit

    def _kill(self, victim: Process, point: str) -> bool:
        """Kill ``victim``; whether it was at ``point``."""
        if point == AT_RANDOM:
            time.sleep(self.draw.expovariate(1 / 0.1))
            self._kill_anyhow(victim)
            return True
        later = self.draw.randrange(20) if point in FREQUENT or victim is not self.fleet.learner else 1
        victim.board.arm(point, self.draw.choice((0, 0, later)))
        if self._died_at(victim, point, 0.5):
            return True
        calm(self.fleet)
        return self._died_at(victim, point, REACH_S) or self._kill_anyhow(victim)

    def _kill_anyhow(self, victim: Process) -> bool:
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
        self.tally.in_flight[victim.kind] += self._in_flight(victim)
        self.tally.hits[victim.kind][point or "random moment"] += 1
        if victim is self.fleet.learner:
            self.fleet.versions.look()

    def _in_flight(self, victim: Process) -> bool:
        if victim is self.fleet.learner:
            return self.fleet.server.board["position"] > victim.board["saved"]
        return any(one.behind for one in self.fleet.robots)

    def _come_back(self, victim: Process) -> None:
        """Start it again, in some rounds to die while it opens; records arrive again, and a learner learns again."""
        if victim.ended() and self.draw.random() < 0.25:
            point = f"{self.draw.choice(('before', 'after'))} {self.draw.choice(OPENINGS)}"
            self.fleet.begin(victim, point)
            self._died_at(victim, point, 0.3)
        if victim.ended():
            self.fleet.begin(victim)
        victim.board.arm("none")
        learner = victim is self.fleet.learner
        before, wanted = self._reached(learner), 1 if learner else PROGRESS
        self.fleet.until(lambda: self._mended() and self._reached(learner) >= before + wanted, f"{victim.kind} goes on")

    def _reached(self, learner: bool) -> int:
        return self.fleet.learner.board["saves"] if learner else self.fleet.acknowledged

    def _mended(self) -> bool:
        """Start again who ended because its disk failed, and a learner whose server ended; True."""
        if any(one.ended() for one in self.fleet.processes):
            calm(self.fleet)
            self.tally.failed += len(self.fleet.mend())
        return True


@contextmanager
def started(fleet: Fleet) -> Iterator[Fleet]:
    """All processes run, and in the end everything that robots made is at the server and at the learner."""
    try:
        fleet.start()
        yield fleet
        fleet.drain()
    finally:
        fleet.close()


HOUR_MS = 3_600_000
FAILING = ("before write", "before sync", "before commit", "before folder sync", "before create")


def reset(fleet: Fleet, draw: random.Random) -> None:
    """Every connection ends with a reset."""
    for one in fleet.robots:
        one.proxy.reset()


def cut(fleet: Fleet, draw: random.Random) -> None:
    """A connection is cut in the middle of something."""
    draw.choice(fleet.robots).proxy.cut_after(draw.randint(0, 40_000))


def slow(fleet: Fleet, draw: random.Random) -> None:
    """A link is late and narrow."""
    proxy = draw.choice(fleet.robots).proxy
    proxy.delay_s, proxy.bytes_per_s = draw.uniform(0.0, 0.05), draw.uniform(50_000, 500_000)


def freeze(fleet: Fleet, draw: random.Random) -> None:
    """A link carries nothing, and neither end learns of it."""
    draw.choice(fleet.robots).proxy.freeze()


def refuse(fleet: Fleet, draw: random.Random) -> None:
    """The server cannot be reached."""
    one = draw.choice(fleet.robots)
    one.proxy.refuse()
    one.proxy.reset()


def flipped_bit(fleet: Fleet, draw: random.Random) -> None:
    """A bit changes on the way."""
    draw.choice(fleet.robots).proxy.flip()


def full_disk(fleet: Fleet, draw: random.Random) -> None:
    """Somebody's disk is full; a robot drops whole episodes then, and no intervention."""
    draw.choice((fleet.server, *fleet.robots)).board["full"] = 1


def failing_disk(fleet: Fleet, draw: random.Random) -> None:
    """A write or a sync of somebody's disk fails: that process ends, and is started again."""
    draw.choice(fleet.processes).board["failing"] = POINTS.index(draw.choice(FAILING))


def clock_jump(fleet: Fleet, draw: random.Random) -> None:
    """Somebody's clock goes forward by up to an hour, and its wall clock anywhere."""
    board = draw.choice((fleet.server, *fleet.robots)).board
    board["ahead_ms"] += draw.randint(0, HOUR_MS)
    board["wall_ms"] = draw.randint(-1000 * HOUR_MS, 1000 * HOUR_MS)


def replaced_robot(fleet: Fleet, draw: random.Random) -> None:
    """A robot is replaced by another one of its name, and is told so."""
    old = draw.choice(fleet.robots)
    fleet.until(lambda: old.board["acknowledged"] or old.ended() or fleet.server.ended(), "the server knows a robot")
    new = fleet.replace(old)
    fleet.until(lambda: new.board["told"] or new.ended() or fleet.server.ended(), "a namesake is told so")


TROUBLE: Mapping[str, Callable[[Fleet, random.Random], None]] = {
    made.__name__: made
    for made in (
        *(reset, cut, slow, freeze, refuse, flipped_bit),
        *(full_disk, failing_disk, clock_jump, replaced_robot),
    )
}


def calm(fleet: Fleet) -> None:
    """Links carry, disks have room and do not fail."""
    for one in fleet.robots:
        one.proxy.calm()
        one.board["failing"] = one.board["full"] = 0
    fleet.server.board["failing"] = fleet.server.board["full"] = fleet.learner.board["failing"] = 0
