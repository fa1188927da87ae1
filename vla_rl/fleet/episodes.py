"""Whole episodes out of the records of many robots; nothing of one that is unfinished or lacks a step."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from vla_rl.contract.errors import ContractError
from vla_rl.contract.spec import EnvSpec
from vla_rl.fleet.episode_end import EpisodeEnd
from vla_rl.fleet.introduction import unpack_introduction
from vla_rl.fleet.record import FleetRecord, Sender
from vla_rl.fleet.step import FleetStep

log = logging.getLogger("vla_rl.fleet")


@dataclass(frozen=True)
class FleetEpisode:
    """An episode that a robot finished: all of its steps, in order."""

    sender: Sender
    name: str
    task: str
    spec: EnvSpec
    steps: tuple[FleetStep, ...]
    versions: tuple[int, ...]  # of the policy, per step
    intervened: tuple[bool, ...]  # per step: whether a person acted
    end: EpisodeEnd


@dataclass
class _Open:
    """What there is of one sender."""

    spec: EnvSpec | None = None
    episode: str = ""
    task: str = ""
    steps: list[bytes] = field(default_factory=list)  # their payloads
    versions: list[int] = field(default_factory=list)
    intervened: list[bool] = field(default_factory=list)
    broken: str = ""  # why the open episode cannot be used

    def begin(self, record: FleetRecord) -> None:
        self.episode, self.task = record.episode, record.task
        self.steps, self.versions, self.intervened, self.broken = [], [], [], ""


class EpisodeReader:
    """Give it a ledger's records in order; it gives the episodes that are whole.

    ``left_out`` counts the others by reason: "unfinished" (the next one began), "incomplete" (a step is missing, the
    robot gave steps up because its disk was full, or it never introduced itself), "unreadable", and "redo" (a person
    asked for it to be played again).
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self._open: dict[Sender, _Open] = {}

    def add(self, record: FleetRecord) -> FleetEpisode | None:
        """The episode that ``record`` completes, if it does."""
        one = self._taken(record)
        return self._ended(one, record) if one else None

    def skip(self, record: FleetRecord) -> None:
        """Take ``record`` in without looking at the episode that it may complete, which was read before."""
        if one := self._taken(record):
            one.begin(record)

    def _taken(self, record: FleetRecord) -> _Open | None:
        """What there is of the sender of a record that ends an episode."""
        one = self._open.setdefault(record.sender, _Open())
        if record.kind == "event":
            self._introduced(one, record)
            return None
        if record.kind == "dropped":
            self._leave(one, "incomplete")
            one.begin(record)
            one.broken = "incomplete"
            return None
        if record.episode != one.episode:
            self._leave(one, "unfinished")
            one.begin(record)
        if record.kind == "step":
            one.steps.append(record.payload)
            one.versions.append(record.policy_version)
            one.intervened.append(record.intervened)
            return None
        return one

    def _introduced(self, one: _Open, record: FleetRecord) -> None:
        try:
            one.spec = unpack_introduction(record.payload) or one.spec
        except ContractError as error:
            log.warning("robot %s: %s", record.robot, error)
            one.broken = one.broken or "unreadable"

    def _ended(self, one: _Open, record: FleetRecord) -> FleetEpisode | None:
        try:
            found = self._whole(one, record)
        except ContractError as error:
            log.warning("robot %s, episode %s: %s", record.robot, record.episode, error)
            found = "unreadable"
        one.begin(record)
        if isinstance(found, FleetEpisode):
            return found
        self.left_out[found] += 1
        return None

    def _whole(self, one: _Open, record: FleetRecord) -> FleetEpisode | str:
        """The episode, or why there is none."""
        end = EpisodeEnd.from_payload(record.payload)
        if one.broken or one.spec is None or len(one.steps) != end.steps or not one.steps:
            return one.broken or "incomplete"
        if end.outcome == "redo":
            return "redo"
        steps = tuple(FleetStep.from_payload(payload) for payload in one.steps)
        if [step.time for step in steps] != [*range(len(steps))]:
            return "incomplete"
        labels = (tuple(one.versions), tuple(one.intervened))
        return FleetEpisode(record.sender, one.episode, one.task, one.spec, steps, *labels, end)

    def _leave(self, one: _Open, why: str) -> None:
        if one.steps or one.broken:
            self.left_out[one.broken or why] += 1
