"""``python -m tests.faults [ROUNDS]``: kill server, learner and robots while records are in flight, and compare.

Every named point of each side is hit twenty times, links, disks and clocks fail meanwhile, and robots are replaced.
Writes ``runs/faults/summary.json``; exits with 1 when anything was lost, stored or learnt from twice or out of order.
Fleets run one after the other, each until its ledger is long: a learner that begins again is sent the whole of it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.audit import Claim, Findings, Learnt, audit, audit_learner
from tests.faults.fleet import Fleet
from tests.faults.rounds import AT_RANDOM, IN_FLIGHT, TROUBLE, Rounds, Tally, started
from tests.faults.sides import KINDS
from vla_rl.fleet.record import Sender

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

    def fleet(self, robots: int = 3) -> Fleet:
        """The next one."""
        self.fleets += 1
        return Fleet(self.folder / str(self.fleets), robots, self.learnt)

    def audit(self, fleet: Fleet) -> None:
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
        shifts.audit(fleet)
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
    shifts.audit(fleet)
    return shifts.summary()


ROUNDS, EACH, LEAST = 1400, 20, 20
_COUNTS = ("lost", "duplicated", "reordered")
SUMMARY = Path("runs/faults/summary.json")


def main(given: Sequence[str]) -> int:
    """Run, print and write the summary; returns the exit code."""
    rounds = int(given[0]) if given else ROUNDS
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=SUMMARY.parent))
    found = run(folder / "run", rounds, EACH, lambda line: print(line, flush=True))
    text = json.dumps(found, indent=2)
    print(text)
    SUMMARY.write_text(text + "\n", encoding="utf-8")
    if wrong := what_is_wrong(found, 0 if given else LEAST):
        print(f"{wrong}; what is left of the fleet is in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def what_is_wrong(found: dict, least: int = 0) -> str:
    """In words; "" when every record arrived and every whole episode was learnt from exactly once and in order.

    Every version of the policy must be whole, with a number of its own.

    ``least``: how often each point of each side must have been hit.
    """
    learner = found["learner"]
    wrong = [f"{found[name]} records {name}" for name in _COUNTS if found[name]]
    wrong += [f"{learner[name]} episodes {name} by the learner" for name in _COUNTS if learner[name]]
    wrong += [*found["strangers"][:5], *learner["wrong"][:5]]
    if 2 * sum(found["in_flight"].values()) < found["rounds"]:
        wrong.append(f"records were in flight in {found['in_flight']} of {found['rounds']} rounds only")
    for kind, made in KINDS.items():
        seldom = [point for point in made.points if found["hits"][kind].get(point, 0) < least]
        wrong += [f"{kind} was hit fewer than {least} times {', '.join(seldom)}"] if seldom else []
    return ", ".join(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
