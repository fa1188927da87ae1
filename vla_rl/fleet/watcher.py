"""What the server knows about its fleet: the ledger's records, counted for the page and for the rule of canaries."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vla_rl.contract.errors import ContractError
from vla_rl.contract.spec import EnvSpec
from vla_rl.fleet.canary import Outcomes
from vla_rl.fleet.episode_end import EpisodeEnd
from vla_rl.fleet.introduction import unpack_introduction
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord, Sender
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.status import Status
from vla_rl.fleet.step import check_step

log = logging.getLogger("vla_rl.fleet")
_BATCH = 256  # records that are read at a time
_SHARE = 16  # one of so many steps is looked into while there is no time for all


@dataclass(frozen=True)
class _Running:
    """A robot's newest episode, as far as its steps are stored; ``version`` is the highest of them (a person's: -1)."""

    sender: Sender | None = None
    episode: str = ""
    steps: int = 0
    version: int = -1


class Watcher:
    """Reads ``ledger`` from its beginning, so that after a restart the counts are those of before.

    waiting  {robot: records that it holds and the server does not}, of the robots that are connected
    alarms   sentences of others, which are taken out of it
    """

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        status: Status,
        waiting: Callable[[], Mapping[str, int]],
        alarms: deque[str],
    ) -> None:
        self._ledger, self._registry, self._status = ledger, registry, status
        self._waiting, self._alarms = waiting, alarms
        self._position, self._present = 0, frozenset[str]()
        self._stages: dict[int, str] = {}
        self._warned: frozenset[str] = frozenset()  # what the canary's alarms are, while it is tried
        self._running = dict[str, _Running]()  # by robot
        self._specs = dict[str, EnvSpec | None]()  # as robots introduced themselves
        self._begin = ledger.position  # what came before was looked into when it came
        self._misfits = dict[str, str]()  # the episode of each robot that was an alarm last

    def look(self) -> bool:
        """Take in what is new; returns whether there may be more at once."""
        waiting = self._waiting()
        self._presence(waiting)
        while self._alarms:
            self._status.alarm(self._alarms.popleft())
        for version, stage in self._registry.releases.stages.items():
            if self._stages.get(version) != stage:
                self._stages[version] = stage
                self._status.policy(version, stage)
        found = self._ledger.read(self._position, _BATCH)
        for position, record in found:
            if position > self._begin and (len(found) < _BATCH or position % _SHARE == 0):
                self._look_into(record)
            self._take(position, record, waiting.get(record.robot, 0))
            self._position = position
        if len(found) < _BATCH:
            self._status.looked()
        return len(found) == _BATCH

    def _presence(self, waiting: Mapping[str, int]) -> None:
        for robot, count in waiting.items():
            self._status.connected(robot, count)
        for robot in self._present - waiting.keys():
            self._status.disconnected(robot)
        self._present = frozenset(waiting)

    def _take(self, position: int, record: FleetRecord, waiting: int) -> None:
        """What can fail comes first: the record is taken in again then, and nothing of it has been counted."""
        if record.kind == "step":
            self._step(record)
        if record.kind == "event":
            self._introduced(record)
        if record.kind == "episode_end":
            try:
                end = EpisodeEnd.from_payload(record.payload)
                if end.outcome != "redo":  # a person had it played again
                    self._ended(position, record, end)
            except ContractError as error:
                self._status.alarm(f"robot {record.robot}, episode {record.episode}: {error}", record.robot)
        if record.kind == "dropped":
            self._status.dropped(record.robot, record.count)
        self._status.stored(record.robot, record.task, record.policy_version, len(record.payload), waiting)

    def _introduced(self, record: FleetRecord) -> None:
        try:
            self._specs[record.robot] = unpack_introduction(record.payload) or self._specs.get(record.robot)
        except ContractError as error:
            self._specs[record.robot] = None
            self._status.alarm(f"robot {record.robot}: {error}", record.robot)

    def _look_into(self, record: FleetRecord) -> None:
        """Say whose step nobody can learn from; it is stored as all others are."""
        if record.kind != "step" or self._misfits.get(record.robot) == record.episode:
            return
        try:
            check_step(record.payload, self._specs.get(record.robot))
        except ContractError as error:
            self._misfits[record.robot] = record.episode
            what = f"episode {record.episode} of robot {record.robot} is stored, and nothing can be learnt from it"
            self._status.alarm(f"{what}: {error}", record.robot)

    def _step(self, record: FleetRecord) -> None:
        before = self._running.get(record.robot, _Running())
        if (before.sender, before.episode) != (record.sender, record.episode):
            before = _Running(record.sender, record.episode)
        self._running[record.robot] = replace(
            before, steps=before.steps + 1, version=max(before.version, record.policy_version)
        )

    def _ended(self, position: int, record: FleetRecord, end: EpisodeEnd) -> None:
        """Interventions and clips are counted once an episode: their control steps belong together."""
        version, verdict = record.policy_version, None
        known = version in self._registry.releases.stages  # else it is nobody's policy, or one from elsewhere
        played = self._running.get(record.robot, _Running())
        if known and played != _Running(record.sender, record.episode, end.steps, version):
            known = False
            self._status.alarm(
                f"robot {record.robot} says that episode {record.episode} of {end.steps} steps ended by policy version "
                f"{version}, which its stored steps do not say, so it does not count for that version; look at it.",
                record.robot,
            )
        if known:
            alone = end.success and not end.intervened  # what a person rescued is no success of the policy
            found = Outcomes(1, int(alone), end.seconds, int(end.intervened > 0), int(end.clipped > 0))
            verdict = self._registry.record(position, record.robot, version, found)
        self._status.episode(record.robot, version, end)
        if not known:
            return
        if verdict is None:
            self._warned = frozenset()
            return
        for sentence in sorted({*verdict.alarms} - self._warned):
            self._status.alarm(sentence)
        self._warned |= {*verdict.alarms}
        if verdict.rollback:
            self._status.alarm(f"the canary was taken back: {verdict.why}; look at what it learned.")
