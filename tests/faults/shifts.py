"""A run of many rounds: fleets one after the other, each until its ledger is long, and what is found in all of them.

A learner that begins again is sent its server's whole ledger, so ledgers of a day would take longer than the kills.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.audit import Claim, Findings, audit, flip
from tests.faults.fleet import Fleet
from tests.faults.learnt import Learnt, audit_learner
from tests.faults.rounds import AT_RANDOM, IN_FLIGHT, Rounds, Tally, started
from tests.faults.sides import KINDS
from tests.faults.trouble import TROUBLE
from vla_rl.fleet.record import Sender

FLIPS = 20
SHIFT = 12_000  # records in a ledger, after which the next fleet begins
_AGAIN = 20  # other rounds for a point that was not reached, at most


def plan(rounds: int, each: int, draw: random.Random) -> list[tuple[str, str]]:
    """(kind, point) of ``rounds`` rounds: every point of each kind ``each`` times, the others at random moments."""
    named = [(kind, point) for kind, made in KINDS.items() for point in made.points for _ in range(each)]
    draw.shuffle(named)
    others = [(draw.choice(list(KINDS)), AT_RANDOM) for _ in range(max(0, rounds - len(named)))]
    chosen = named[:rounds] + others
    draw.shuffle(chosen)
    return chosen


class Shifts:
    """Fleets below ``folder``, one after the other, and what was found."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.tally, self.found, self.learnt = Tally(), Findings(), Learnt()
        self.fleets = 0
        self._flips = {"records": 0, "told": 0, "others_lost": 0}

    def fleet(self, robots: int = 3) -> Fleet:
        """The next one."""
        self.fleets += 1
        return Fleet(self.folder / str(self.fleets), robots, self.learnt)

    def audit(self, fleet: Fleet, flips: int) -> None:
        """Count what the ended ``fleet`` holds; its folder stays only if something is amiss."""
        claims = []
        for one in fleet.lives:
            epoch = one.folder.with_suffix(".epoch")
            if epoch.exists():
                sender = Sender(one.name, epoch.read_text(encoding="ascii"))
                must = one.board["acknowledged" if one.gone else "appended"]
                claims.append(Claim(sender, one.board["acknowledged"], must))
        before = self._amiss()
        audit(fleet.server.folder, claims, self.found)
        audit_learner(fleet.server.folder, fleet.learner.folder, self.learnt)
        self.tally.replaced += sum(one.gone for one in fleet.lives)
        if flips:
            told, others = flip(fleet.server.folder, fleet.folder / "flipped", flips, self.draw)
            self._flips = {"records": flips, "told": told, "others_lost": others}
        if self._amiss() == before:
            shutil.rmtree(fleet.folder)

    def _amiss(self) -> tuple[object, ...]:
        counts = [(one.lost, one.duplicated, one.reordered) for one in (self.found, self.learnt)]
        return (*counts, len(self.found.strangers), len(self.learnt.wrong))

    def summary(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "rounds": tally.rounds,
            "hits": {kind: dict(sorted(hits.items())) for kind, hits in tally.hits.items()},
            **asdict(self.found),
            "learner": vars(self.learnt) | {"left_out": dict(self.learnt.left_out)},
            "in_flight": dict(tally.in_flight),
            "in_flight_means": IN_FLIGHT,
            "missed": dict(tally.missed),
            "trouble": dict(tally.trouble),
            "failed_disks": tally.failed,
            "replaced_robots": tally.replaced,
            "fleets": self.fleets,
            "flipped_bits": self._flips,
        }


def run(folder: Path, rounds: int, each: int, say: Callable[[str], None], seed: int = 0) -> dict[str, Any]:
    """The summary of ``rounds`` rounds on fleets below ``folder``, each point hit ``each`` times where it fits."""
    start, draw = time.monotonic(), random.Random(seed)
    shifts, left, again = Shifts(folder, draw), plan(rounds, each, draw)[::-1], Counter[tuple[str, str]]()
    while left:
        with started(shifts.fleet()) as fleet:
            running = Rounds(fleet, draw, shifts.tally)
            while left and fleet.server.board["position"] < SHIFT:
                kind, point = left.pop()
                trouble = draw.choice((*TROUBLE, *[""] * len(TROUBLE)))
                if not running.run(kind, point, trouble) and again[kind, point] < _AGAIN:
                    again[kind, point] += 1
                    left.insert(0, (kind, point))
        shifts.audit(fleet, 0 if left else FLIPS)
        found, seconds = shifts.found, time.monotonic() - start
        say(f"{shifts.tally.rounds} kills, {found.acknowledged} records, {seconds:.0f} s, {len(left)} rounds left")
    return shifts.summary() | {"seconds": round(time.monotonic() - start, 1)}


def play(folder: Path, rounds: Sequence[tuple[str, str, str]], robots: int) -> dict[str, Any]:
    """The summary of these rounds: (kind, point, trouble) of each; a point that was not reached gets other rounds."""
    shifts = Shifts(folder, random.Random(0))
    with started(shifts.fleet(robots)) as fleet:
        running = Rounds(fleet, random.Random(0), shifts.tally)
        for kind, point, trouble in rounds:
            _ = any(running.run(kind, point, trouble) for _ in range(_AGAIN))
    shifts.audit(fleet, FLIPS)
    return shifts.summary()
