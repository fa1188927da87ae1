"""The fleet's page, served by the server itself: live, read-only, and without a network beside its own.

``/`` is the page, ``/events`` its stream (server-sent events), ``/status`` the same once as JSON, ``/metrics`` for
Prometheus.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vla_rl.contract.intervals import wilson
from vla_rl.fleet.payloads import EpisodeEnd
from vla_rl.pages import PageAddress, PageServer, render

_NOW = {
    "connected": "1 while the robot is connected",
    "waiting": "records that the robot holds and the server does not",
    "version": "version of the policy that the robot used last",
}
_OF_ROBOTS = {
    "records": "records that are durable on the server",
    "bytes": "bytes of durable records",
    "dropped": "records that the robot gave up because its disk was full",
    "episodes": "whole episodes",
    "successes": "episodes that succeeded",
    "steps": "control steps of whole episodes",
    "intervened": "control steps that a person chose",
    "clipped": "control steps whose request the supervisor changed",
}
_OF_VERSIONS = {"episodes": "whole episodes", "successes": "episodes that succeeded"}
_STATES = ("staged", "canary", "active", "retired")
ALARMS = 50  # sentences that are kept, the newest
ALARMS_OF_ONE = 5  # of a robot
STALE_S, ABSENT_S = 5.0, 60.0  # after which it is said that nothing is counted, and that a robot was not heard
VERSIONS_OF_ONE = 4  # that a robot may name and that were not published here; others are counted together
OTHERS = -1  # the version under which they are
RECENT = 400  # episodes whose outcome is kept for the curve


@dataclass
class Tally:
    """Episodes of a robot or of a version, and whose control steps they were."""

    episodes: int = 0
    successes: int = 0
    steps: int = 0
    intervened: int = 0
    clipped: int = 0
    seconds: float = 0.0

    def add(self, end: EpisodeEnd) -> None:
        """Count one more episode."""
        self.episodes += 1
        self.successes += end.success
        self.steps += end.steps
        self.intervened += end.intervened
        self.clipped += end.clipped
        self.seconds += end.seconds

    def to_json(self) -> dict[str, Any]:
        """The counts, with the success rate's interval (Wilson, 95 %)."""
        low, high = wilson(self.successes, self.episodes)
        rate = self.successes / self.episodes if self.episodes else None
        return vars(self) | {"success": rate, "low": low, "high": high}


@dataclass
class _Robot:
    connected: bool = False
    heard: float | None = None  # seconds of the clock; None: not since the server began
    task: str = ""
    version: int = 0
    waiting: int = 0  # records that the robot holds and the server does not
    records: int = 0
    bytes: int = 0
    dropped: int = 0
    tally: Tally = field(default_factory=Tally)
    named: set[int] = field(default_factory=set)  # versions that were not published here


class Status:
    """Counts of everything that the fleet did; safe to use from several threads.

    ``clock`` is monotonic, in seconds; ``wall`` is what people read beside an alarm.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall, self._started = clock, wall, clock()
        self._lock = threading.Lock()
        self._total = Tally()
        self._robots: dict[str, _Robot] = {}
        self._versions: dict[int, Tally] = {}
        self._states: dict[int, str] = {}
        self._recent: deque[tuple[int, bool]] = deque(maxlen=RECENT)
        self._alarms: deque[dict[str, Any]] = deque(maxlen=ALARMS)
        self._alarmed = 0
        self._learner: dict[str, float] = {}
        self._learner_heard: float | None = None
        self._standing: dict[str, dict[str, Any]] = {}  # what is wrong now
        self._looked: float | None = None  # when the ledger was last looked at

    def connected(self, robot: str, waiting: int) -> None:
        """``robot`` has begun to send, and holds ``waiting`` records that are not stored here."""
        with self._lock:
            one = self._robot(robot)
            one.connected, one.waiting, one.heard = True, waiting, self._clock()

    def disconnected(self, robot: str) -> None:
        with self._lock:
            self._robot(robot).connected = False

    def stored(self, robot: str, task: str, version: int, size: int, waiting: int) -> None:
        """A record of ``size`` bytes is durable, and ``waiting`` more are on their way."""
        with self._lock:
            one = self._robot(robot)
            one.task, one.version, one.waiting = task or one.task, version, waiting
            if one.connected:  # else the record is of an earlier life of the server
                one.heard = self._clock()
            one.records += 1
            one.bytes += size

    def dropped(self, robot: str, count: int) -> None:
        """``robot`` gave up ``count`` records because its disk was full."""
        with self._lock:
            self._robot(robot).dropped += count

    def episode(self, robot: str, version: int, end: EpisodeEnd) -> None:
        with self._lock:
            known = self._known_version(robot, version)
            for tally in (self._total, self._robot(robot).tally, self._versions.setdefault(known, Tally())):
                tally.add(end)
            self._recent.append((known, end.success))

    def policy(self, version: int, state: str) -> None:
        """``version`` is "staged", "canary", "active" or "retired" from now on."""
        with self._lock:
            self._states[version] = state

    def learner(self, seen: Mapping[str, float]) -> None:
        """How far the learner is: "episodes" that it has taken in, gradient "updates", and its metrics."""
        with self._lock:
            self._learner, self._learner_heard = dict(seen), self._clock()

    def looked(self) -> None:
        """Everything that is on the disk has been counted until now."""
        with self._lock:
            self._looked = self._clock()

    def alarm(self, sentence: str, robot: str = "") -> None:
        """Something happened that a person should look at; of a ``robot``, the newest few are kept."""
        with self._lock:
            self._alarmed += 1
            for old in [one for one in self._alarms if one["sentence"] == sentence]:
                self._alarms.remove(old)
            alike = [one for one in self._alarms if robot and one["robot"] == robot]
            for old in alike[: max(0, len(alike) + 1 - ALARMS_OF_ONE)]:
                self._alarms.remove(old)
            self._alarms.append({"at": self._wall(), "sentence": sentence, "robot": robot})

    def standing(self, what: str, sentence: str) -> None:
        """``sentence`` is true from now on, until another one or "" is given for ``what``."""
        with self._lock:
            if not sentence:
                self._standing.pop(what, None)
                return
            self._alarmed += what not in self._standing
            at = self._standing.get(what, {"at": self._wall()})["at"]
            self._standing[what] = {"at": at, "sentence": sentence, "robot": ""}

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        with self._lock:
            now = self._clock()
            return {
                "seconds": now - self._started,
                "total": self._total.to_json(),
                "robots": {name: _robot_json(one, now) for name, one in sorted(self._robots.items())},
                "versions": {str(version): self._version_json(version) for version in self._known_versions()},
                "recent": [[version, success] for version, success in self._recent],
                "learner": dict(self._learner),
                "learner_silent": None if self._learner_heard is None else now - self._learner_heard,
                "alarms": [*self._standing.values(), *self._computed(now), *list(self._alarms)[::-1]],
                "alarmed": self._alarmed,
            }

    def _computed(self, now: float) -> list[dict[str, Any]]:
        """Alarms that are true at this moment; ``at``: since when."""
        found: list[tuple[float, str]] = []
        if self._looked is not None and now - self._looked > STALE_S:
            what = "what robots sent is not counted since then, so robots, episodes and policies here are of that time"
            found.append((now - self._looked, f"{what}; look at the server's log."))
        for name, one in sorted(self._robots.items()):
            if not one.connected and one.heard is not None and now - one.heard > ABSENT_S:
                what = f"robot {name!r} has not been heard since then"
                found.append((now - one.heard, f"{what}; look at its network, or whether it is switched off."))
        return [{"at": self._wall() - ago, "sentence": what, "robot": ""} for ago, what in found[:ALARMS]]

    def _known_version(self, robot: str, version: int) -> int:
        """``version``, or OTHERS where ``robot`` names more than its share of unknown ones."""
        named = self._robot(robot).named
        if version in self._states or version in named:
            return version
        if len(named) >= VERSIONS_OF_ONE:
            return OTHERS
        named.add(version)
        return version

    def _robot(self, name: str) -> _Robot:
        return self._robots.setdefault(name, _Robot())

    def _known_versions(self) -> list[int]:
        return sorted(self._states.keys() | self._versions.keys())

    def _version_json(self, version: int) -> dict[str, Any]:
        return self._versions.get(version, Tally()).to_json() | {"state": self._states.get(version, "")}


def _robot_json(robot: _Robot, now: float) -> dict[str, Any]:
    own = {name: value for name, value in vars(robot).items() if name not in ("tally", "heard", "named")}
    silent = None if robot.heard is None else now - robot.heard
    return own | robot.tally.to_json() | {"silent": silent}


def serve_page(status: Status, address: PageAddress) -> PageServer:
    """The page of ``status``, served until it is closed; raises UserError when the port is taken or forbidden."""

    def events() -> Iterator[bytes]:
        yield f"data: {json.dumps(status.snapshot())}\n\n".encode()
        while not server.ending.wait(1.0):
            yield f"data: {json.dumps(status.snapshot())}\n\n".encode()

    server = PageServer(
        address,
        lambda nonce: render("fleet.html", "vla-rl fleet", nonce),
        {
            "/events": lambda: ("text/event-stream", events()),
            "/status": lambda: ("application/json", json.dumps(status.snapshot()).encode()),
            "/metrics": lambda: ("text/plain; version=0.0.4; charset=utf-8", metrics(status)),
        },
    )
    return server.start()


class _Collector:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Every family, read from one snapshot."""
        seen = self._status.snapshot()
        yield CounterMetricFamily("vla_rl_fleet_alarms", "alarms since the server began", value=seen["alarmed"])
        for name in ("updates", "episodes"):
            if name in seen["learner"]:
                what = f"{name} of the learner, also of its runs before"
                yield GaugeMetricFamily(f"vla_rl_fleet_learner_{name}", what, value=seen["learner"][name])
        robots, versions = seen["robots"], seen["versions"]
        for name, what in _NOW.items():
            yield _family(GaugeMetricFamily, what, "robot", robots, name)
        for name, what in _OF_ROBOTS.items():
            yield _family(CounterMetricFamily, what, "robot", robots, name, "robot_")
        for name, what in _OF_VERSIONS.items():
            yield _family(CounterMetricFamily, what, "version", versions, name, "version_")
        labels = ("version", "state")
        state = GaugeMetricFamily("vla_rl_fleet_version_state", "1 for the state that it is in", labels=labels)
        for version, one in versions.items():
            for name in _STATES:
                state.add_metric((version, name), float(one["state"] == name))
        yield state


def metrics(status: Status) -> bytes:
    """The present metrics of ``status``, as Prometheus scrapes them."""
    return generate_latest(_Collector(status))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    what: str,
    label: str,
    of: Mapping[str, Any],
    name: str,
    before: str = "",
) -> Metric:
    """The numbers called ``name`` of all robots or versions."""
    family: Any = kind(f"vla_rl_fleet_{before}{name}", what, labels=(label,))
    for key, one in of.items():
        family.add_metric((key,), float(one[name]))
    return family
