"""Whole episodes out of the records of many robots; nothing of one that is unfinished or lacks a step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.payloads import EpisodeEnd, FleetStep, unpack_introduction
from vla_rl.fleet.record import FleetRecord, Sender

log = logging.getLogger("vla_rl.fleet")
MAX_EPISODE = 512 << 20  # bytes of an open episode's steps, encoded
MAX_DECODED = 4 << 30  # of its pictures
Tell = Callable[[str, str, str], None]  # robot, episode, and why it is not used


def tell_log(robot: str, episode: str, why: str) -> None:
    """Who does not listen finds it in the log."""
    log.warning("robot %s, episode %s: %s", robot, episode, why)


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

    sender: Sender
    spec: EnvSpec | None = None
    since: int = 0  # where the open episode began
    episode: str = ""
    task: str = ""
    steps: list[FleetRecord] = field(default_factory=list)
    held: int = 0  # bytes of their payloads
    broken: str = ""  # why the open episode cannot be used

    def begin(self, record: FleetRecord, position: int) -> None:
        self.episode, self.task, self.steps, self.held, self.broken = record.episode, record.task, [], 0, ""
        self.since = position

    def add(self, record: FleetRecord) -> bool:
        """Keep a step; returns False once the episode is too long to be kept."""
        self.held += len(record.payload)
        self.steps.append(record)
        if self.held > MAX_EPISODE:
            self.steps.clear()
        return bool(self.steps)


class EpisodeReader:
    """Give it a ledger's records in order; it gives the episodes that are whole.

    ``left_out`` counts the others by reason: "unfinished" (the next one began), "incomplete" (a step is missing, the
    robot gave steps up because its disk was full, or it never introduced itself), "unreadable" (a step is not finite or
    does not fit what the robot introduced), "too long", and "redo" (a person asked for it to be played again).
    ``tell`` is told by name which were unreadable or too long.  One episode a robot is open at a time.

    Where positions of the ledger are given, a later reader can go on: it gets :meth:`state_dict` and the records from
    :meth:`oldest` on.
    """

    def __init__(self, tell: Tell = tell_log) -> None:
        self.left_out: Counter[str] = Counter()
        self._open: dict[str, _Open] = {}
        self._tell = tell

    def add(self, record: FleetRecord, position: int = 0) -> FleetEpisode | None:
        """The episode that ``record``, at ``position``, completes, if it does."""
        one = self._taken(record, position)
        return self._ended(one, record, position) if one else None

    def skip(self, record: FleetRecord, position: int = 0) -> None:
        """Take ``record`` in without looking at the episode that it may complete, which was read before."""
        if one := self._taken(record, position):
            one.begin(record, position)

    def oldest(self) -> int | None:
        """The position of the first record of the episodes that are open; None while none is."""
        return min((one.since for one in self._open.values() if one.steps or one.broken), default=None)

    def state_dict(self) -> dict[str, Any]:
        """{robot: its epoch, and the environment that it introduced}; nothing of open episodes."""
        return {
            robot: {"epoch": one.sender.epoch, "spec": one.spec and one.spec.to_json()}
            for robot, one in self._open.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for robot, one in state.items():
            spec = EnvSpec.from_json(one["spec"]) if one["spec"] else None
            self._open[robot] = _Open(Sender(robot, one["epoch"]), spec)

    def _taken(self, record: FleetRecord, position: int) -> _Open | None:
        one = self._open.get(record.robot)
        if one is None or one.sender != record.sender:  # a robot whose spool is new
            if one is not None:
                self._leave(one, "unfinished")
            one = self._open[record.robot] = _Open(record.sender)
        if record.kind == "event":
            self._introduced(one, record, position)
            return None
        if record.kind == "dropped":
            self._leave(one, "incomplete")
            one.begin(record, position)
            one.broken = "incomplete"
            return None
        if record.episode != one.episode:
            self._leave(one, "unfinished")
            one.begin(record, position)
        if record.kind == "step":
            if not one.broken and not one.add(record):
                one.broken = "too long"
                self._tell(record.robot, record.episode, f"it has more than {MAX_EPISODE >> 20} MB of steps")
            return None
        return one

    def _introduced(self, one: _Open, record: FleetRecord, position: int) -> None:
        try:
            spec = unpack_introduction(record.payload)
        except ContractError as error:
            self._tell(record.robot, record.episode, str(error))
            one.spec = None
            one.broken = one.broken or "unreadable"
        else:
            if spec is not None:  # the robot has begun anew
                if one.steps:
                    self._leave(one, "unfinished")
                one.begin(record, position)
                one.spec = spec

    def _ended(self, one: _Open, record: FleetRecord, position: int) -> FleetEpisode | None:
        try:
            found = self._whole(one, record)
        except ContractError as error:
            self._tell(record.robot, record.episode, str(error))
            found = "unreadable"
        one.begin(record, position)
        if isinstance(found, FleetEpisode):
            return found
        self.left_out[found] += 1
        return None

    def _whole(self, one: _Open, record: FleetRecord) -> FleetEpisode | str:
        end = EpisodeEnd.from_payload(record.payload)
        if one.broken or one.spec is None or len(one.steps) != end.steps or not one.steps:
            return one.broken or "incomplete"
        if end.outcome == "redo":
            return "redo"
        pixels = sum(math.prod(item.shape) for item in one.spec.images.values())
        if pixels * len(one.steps) > MAX_DECODED:
            raise ContractError(f"its pictures would take more than {MAX_DECODED >> 30} GiB")
        steps = tuple(FleetStep.from_payload(step.payload, one.spec) for step in one.steps)
        like = _labels(steps[0])
        for step in steps:
            if _labels(step) != like:
                raise ContractError(f"its step {step.time} has other labels than its first")
        if [step.time for step in steps] != [*range(len(steps))]:
            return "incomplete"
        versions, people = zip(*((step.policy_version, step.intervened) for step in one.steps), strict=True)
        return FleetEpisode(record.sender, one.episode, one.task, one.spec, steps, versions, people, end)

    def _leave(self, one: _Open, why: str) -> None:
        if one.steps or one.broken:
            self.left_out[one.broken or why] += 1


def _labels(step: FleetStep) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(value.dtype), value.shape) for name, value in step.labels.items()}
