"""What the ledger holds at the end, record by record, against what robots were told is safe."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.known import fields_of, is_known
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord, Sender

_PAGE = 2000


@dataclass
class Claim:
    """What became known of one robot's spool: so many records are acknowledged, and so many must arrive in the end."""

    sender: Sender
    acknowledged: int
    appended: int


@dataclass
class Findings:
    """``lost`` counts acknowledged records that are not there, or not as they were made.

    ``dropped``: those that robots gave up because their disks were full, and said so.
    """

    acknowledged: int = 0
    stored: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    dropped: int = 0
    strangers: list[str] = field(default_factory=list)


def audit(folder: Path, claims: Sequence[Claim], found: Findings | None = None) -> Findings:
    """Compare the closed ledger in ``folder`` with ``claims``; counted on in ``found``."""
    found, seen = found or Findings(), dict[Sender, set[int]]()
    last: dict[Sender, int] = {}
    ledger = Ledger(folder)
    position = 0
    while page := ledger.read(position, _PAGE):
        position = page[-1][0]
        for _, record in page:
            enter(record, found, seen.setdefault(record.sender, set()), last)
    if ledger.damaged() or ledger.conflicts():
        found.strangers.append(f"{len(ledger.damaged())} damaged, {len(ledger.conflicts())} in conflict")
    ledger.close()
    for claim in claims:
        there = seen.pop(claim.sender, set())
        found.acknowledged += claim.acknowledged
        found.lost += len(set(range(max(claim.acknowledged, claim.appended))) - there)
    found.strangers += [f"records of {sender}" for sender in seen]
    return found


def enter(record: FleetRecord, found: Findings, there: set[int], last: dict[Sender, int]) -> None:
    numbers = range(record.seq, record.last + 1)
    found.reordered += record.seq <= last.get(record.sender, -1)
    found.duplicated += sum(number in there for number in numbers)
    found.stored += record.kind != "dropped"
    last[record.sender] = record.last
    if record.kind == "dropped":
        found.dropped += record.count
        kept = [seq for seq in numbers if fields_of(record.robot, record.epoch, seq)["intervened"]]
        found.strangers += [f"record {seq} of an intervention was dropped by {record.robot}" for seq in kept]
        there.update(numbers)
    elif is_known(record):
        there.add(record.seq)
    else:
        found.strangers.append(f"record {record.seq} of {record.sender}")


def flip(folder: Path, target: Path, count: int, draw: random.Random) -> tuple[int, int]:
    """Flip a bit in each of ``count`` records of a copy of the ledger: how many were told, and how many others lost."""
    shutil.copytree(folder, target)
    sound = Ledger(folder)
    total = sound.position
    hit = set(draw.sample(range(1, total + 1), count))
    for position in hit:
        ((_, record),) = sound.read(position - 1, 1)
        _flip(target, record.encoded, draw)
    sound.close()
    ledger, position, whole = Ledger(target), 0, set[int]()
    logging.getLogger("vla_rl.fleet").setLevel(logging.CRITICAL)  # each of them is logged
    while page := ledger.read(position, _PAGE):
        position = page[-1][0]
        whole |= {number for number, _ in page}
    told = set(ledger.damaged())
    logging.getLogger("vla_rl.fleet").setLevel(logging.NOTSET)
    ledger.close()
    shutil.rmtree(target)
    return len(told & hit), len(set(range(1, total + 1)) - whole - hit) + len(told - hit)


def _flip(folder: Path, encoded: bytes, draw: random.Random) -> None:
    for path in sorted(folder.glob("*.seg")):
        data = bytearray(path.read_bytes())
        if (at := data.find(encoded)) >= 0:
            data[at + draw.randrange(len(encoded))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            return
    raise AssertionError("a stored record is in no segment")
