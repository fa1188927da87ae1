"""What the ledger holds at the end, record by record, against what robots were told is safe."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.known import fields_of, identity, is_known
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.episodes import EpisodeReader
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.manifest import TrustedKeys
from vla_rl.fleet.record import FleetRecord, Sender
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import REMOVED
from vla_rl.recipes.fleet.export import records
from vla_rl.training.checkpoint import latest_state


@dataclass
class Learnt:
    """``episodes`` are the whole ones of the ledger; ``lost`` those that the learner's last state does not hold.

    ``left_out``: episodes that are not whole, by reason.  ``looks``: how often the registry was looked at while no
    learner ran.
    """

    episodes: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    versions: int = 0
    looks: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def compare(self, whole: Sequence[str], added: Sequence[str]) -> None:
        """Count the episodes ``whole`` of the ledger, and what is amiss with those that were ``added``, in order."""
        place, count = {name: i for i, name in enumerate(whole)}, Counter(added)
        self.episodes += len(whole)
        self.lost += sum(name not in count for name in whole)
        self.duplicated += sum(times - 1 for times in count.values())
        self.wrong += [f"an episode that the ledger has not: {name}" for name in count if name not in place]
        order = [place[name] for name in dict.fromkeys(added) if name in place]
        self.reordered += int((np.diff(order) < 0).sum())


def audit_learner(ledger: Path, run: Path, found: Learnt) -> None:
    """Compare the episodes of the closed ledger with the last state of the learner in ``run``."""
    opened, reader, position = Ledger(ledger), EpisodeReader(), 0
    whole: list[str] = []
    for position, record in records(opened):  # noqa: B007  # the last one is compared
        if (episode := reader.add(record)) is not None:
            whole.append(identity(episode.sender.robot, [step.action.tolist() for step in episode.steps]))
    opened.close()
    found.left_out += reader.left_out
    state: Any = (latest_state(run / "state") or (0, {}))[1]
    if state.get("position") != position:
        found.wrong.append(f"the learner's last state is of position {state.get('position')} of {position}")
    if state.get("episodes") != len(whole):
        found.wrong.append(f"the learner counted {state.get('episodes')} episodes of {len(whole)}")
    found.compare(whole, state.get("learner", {}).get("added", ()))


class Versions:
    """What was seen in the registry of a fleet: nothing of it may change, and all of it is whole."""

    def __init__(self, folder: Path, found: Learnt) -> None:
        self._folder, self._found = folder, found
        self._history: list[dict[str, Any]] = []
        self._manifests: dict[int, bytes] = {}

    def look(self, last: bool = False) -> None:
        """While no learner runs: compare with what was there before; read all versions again if it is the ``last``."""
        registry = Registry(self._folder / "registry")
        history = registry.history()
        published = [change["version"] for change in history if change["do"] == "publish"]
        if history[: len(self._history)] != self._history:
            self._found.wrong.append("what the registry's history said has changed")
        if published != sorted(set(published)):
            self._found.wrong.append(f"versions were published out of order or twice: {published}")
        trusted = TrustedKeys([(self._folder / "signing.pub").read_bytes()])
        for version, stage in registry.releases.stages.items():
            if stage != REMOVED and (last or version not in self._manifests):
                self._read(registry, trusted, version)
        self._history = history
        self._found.looks += 1
        self._found.versions += len(published) if last else 0

    def _read(self, registry: Registry, trusted: TrustedKeys, version: int) -> None:
        """Everything that a robot would fetch of a version."""
        signed = registry.manifest(version)
        if self._manifests.setdefault(version, signed) != signed:
            self._found.wrong.append(f"version {version} has another manifest than before")
        try:
            manifest = trusted.read(signed)
            broken = [
                digest
                for digest, size in manifest.chunks().items()
                if hashlib.sha256(data := registry.chunk(digest, 0, size + 1)).hexdigest() != digest
                or len(data) != size
            ]
        except ContractError as error:
            self._found.wrong.append(f"version {version} cannot be read: {error}")
            return
        if broken or manifest.version != version:
            self._found.wrong.append(f"version {version} is not whole: {broken}")


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
    for _, record in records(ledger):
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
