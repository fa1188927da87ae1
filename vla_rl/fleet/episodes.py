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
    end: EpisodeEnd


@dataclass
class _Open:
    """What there is of one sender."""

    spec: EnvSpec | None = None
    episode: str = ""
    task: str = ""
    steps: list[FleetStep] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    broken: str = ""  # why the open episode cannot be used

    def begin(self, record: FleetRecord) -> None:
        self.episode, self.task = record.episode, record.task
        self.steps, self.versions, self.broken = [], [], ""


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
        one = self._open.setdefault(record.sender, _Open())
        try:
            return self._taken(one, record)
        except ContractError as error:
            log.warning("robot %s, episode %s: %s", record.robot, record.episode, error)
            one.broken = one.broken or "unreadable"
            return None

    def _taken(self, one: _Open, record: FleetRecord) -> FleetEpisode | None:
        if record.kind == "event":
            one.spec = unpack_introduction(record.payload) or one.spec
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
            self._step(one, record)
            return None
        return self._ended(one, record)

    def _step(self, one: _Open, record: FleetRecord) -> None:
        step = FleetStep.from_payload(record.payload)
        if step.time != len(one.steps):
            one.broken = one.broken or "incomplete"
        one.steps.append(step)
        one.versions.append(record.policy_version)

    def _ended(self, one: _Open, record: FleetRecord) -> FleetEpisode | None:
        end = EpisodeEnd.from_payload(record.payload)
        whole = None
        if one.broken or one.spec is None or len(one.steps) != end.steps or not one.steps:
            self.left_out[one.broken or "incomplete"] += 1
        elif end.outcome == "redo":
            self.left_out["redo"] += 1
        else:
            steps, versions = tuple(one.steps), tuple(one.versions)
            whole = FleetEpisode(record.sender, one.episode, one.task, one.spec, steps, versions, end)
        one.begin(record)
        return whole

    def _leave(self, one: _Open, why: str) -> None:
        if one.steps or one.broken:
            self.left_out[one.broken or why] += 1
