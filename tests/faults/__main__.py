"""``python -m tests.faults [ROUNDS]``: kill server, learner and robots while records are in flight, and compare.

Every named point of each side is hit twenty times, links, disks and clocks fail meanwhile, and robots are replaced.
Writes ``runs/faults/summary.json``; exits with 1 when anything was lost, stored or learnt from twice or out of order.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.shifts import run
from tests.faults.sides import KINDS

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

    Every flipped bit must have been told, and every version of the policy be whole, with a number of its own.

    ``least``: how often each point of each side must have been hit.
    """
    flips, learner = found["flipped_bits"], found["learner"]
    wrong = [f"{found[name]} records {name}" for name in _COUNTS if found[name]]
    wrong += [f"{learner[name]} episodes {name} by the learner" for name in _COUNTS if learner[name]]
    wrong += [*found["strangers"][:5], *learner["wrong"][:5]]
    if 2 * sum(found["in_flight"].values()) < found["rounds"]:
        wrong.append(f"records were in flight in {found['in_flight']} of {found['rounds']} rounds only")
    if flips["told"] != flips["records"] or flips["others_lost"]:
        wrong.append(f"flipped bits: {flips}")
    for kind, made in KINDS.items():
        seldom = [point for point in made.points if found["hits"][kind].get(point, 0) < least]
        wrong += [f"{kind} was hit fewer than {least} times {', '.join(seldom)}"] if seldom else []
    return ", ".join(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
