"""A fleet on one machine: simulated robots, a server, a learner beside it, scripted people, and a page about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.config import Checked, JsonMapping, JsonObject, at_least, within
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.report import Cell, Clip, Report, Series, Tile, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode
from vla_rl.fleet.identity import Authority
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.manifest import TrustedKeys, spec_hash
from vla_rl.fleet.payloads import EpisodeEnd
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.server import LEDGER, REGISTRY, FleetServer, FleetServerConfig
from vla_rl.fleet.transport import TransportOptions
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.fleet import serving
from vla_rl.recipes.fleet.export import records
from vla_rl.recipes.fleet.learners import Learn
from vla_rl.recipes.fleet.serving import PUBLIC_KEY
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.robots import drive
from vla_rl.recipes.terminal import bar, clock, console
from vla_rl.serving.served import servable_spec
from vla_rl.training.device import shared
from vla_rl.training.tracking import RunFolder

_LOOK_S = 0.5  # how often the server's counts are looked at
_AHEAD = 20  # episodes by which robots may be ahead of the learner, which has nothing to learn at first
_STEPS = 8  # actions of a chunk that a tested robot executes


@dataclass(frozen=True)
class FleetDemo(Checked):
    """A policy is imitated, then robots practise with it, a person corrects them, and a learner improves it meanwhile.

    Server, learner and robots are processes as on machines of their own: mutual TLS, records on the server's disk
    before they are acknowledged, signed policies that robots swap between episodes.  A run that was stopped goes on
    where the server's ledger ends; its robots then begin again with their first scenes.

    base      the policy that the fleet begins with
    learn     the learner; its ``policy`` and ``demonstrations`` are those of ``base``
    robots               simulated SO-101 arms
    episodes             that each of them plays
    updates_per_episode  updates that the learner takes for every episode: the robots, which are faster than real ones,
                         wait for it, so that what comes out depends little on the machine; 0: nobody waits
    test                 scenes on which the first and the last policy are tried, each on a robot alone
    page_port            of the live page, 0: any that is free
    """

    base: Imitate
    learn: Learn
    robots: int = within(4, 1, 64)
    episodes: int = at_least(100, 1)
    updates_per_episode: float = at_least(15.0, 0)
    test: int = at_least(100, 1)
    page_port: int = within(0, 0, 65535)
    seed: int = 1
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics of the imitation go

    def run(self, folder: RunFolder) -> JsonObject:
        """Imitate, practise, test, report."""
        seconds: dict[str, float] = {}
        base, fleet = replace(self.base, seed=self.seed), folder.path / "fleet"
        base.imitate(*base.ground(folder, seconds), folder, seconds)
        with clock(seconds, "fleet"), shared():
            stored = self._practise(folder, fleet)
        first, last = folder.checkpoint("imitation"), self._last(folder, fleet)
        with clock(seconds, "test"):
            before, after = self._tried(first), self._tried(last)
        summary = {
            "imitation": asdict(before),
            "fleet": asdict(after),
            **stored,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "seed": self.seed,
        }
        folder.write_summary(summary)  # safe before the page is made
        with closing(Ledger(fleet / LEDGER)) as ledger:
            write_report(folder, summary, ledger, Registry(fleet / REGISTRY))
        console.print(
            f"\n[bold]imitation {before.success:.1%}  ->  fleet {after.success:.1%}[/bold] on {self.test} test scenes, "
            f"each alone on a robot, in {sum(seconds.values()):.0f} s.  Open {folder.path}/report.html"
        )
        return summary

    def _practise(self, folder: RunFolder, fleet: Path) -> dict[str, Any]:
        """Serve, learn and play; returns what the server has counted."""
        names = [f"arm-{number}" for number in range(1, self.robots + 1)]
        certificates = _certificates(folder.path / "certificates", names)
        shown = str(folder.path / "demonstrations")
        learn = replace(self.learn, policy=str(folder.checkpoint("imitation")), demonstrations=shown, seed=self.seed)
        beginning = serving.Beginning(learn.policy, learn)
        config = FleetServerConfig(TransportOptions(port=0), self.page_port)
        with serving.opened(fleet, config, str(certificates / "server"), beginning, console) as server:
            before = _ended(server.ledger)
            left = {name: self.episodes - before[name] for name in names if before[name] < self.episodes}
            address = f"{config.transport.host}:{server.transport.port}"
            with closing(RobotProcesses(folder.path / "robots", address, certificates, left, self.seed)) as robots:
                self._watch(server, robots)
            return _counted(server)

    def _watch(self, server: FleetServer, robots: RobotProcesses) -> None:
        with bar("fleet", self.robots * self.episodes) as update:
            while robots.running:
                time.sleep(_LOOK_S)
                seen = server.status.snapshot()
                episodes = seen["total"]["episodes"]
                robots.pause(seen["learner"].get("updates", 0) < self.updates_per_episode * (episodes - _AHEAD))
                update(episodes, _remark(server, seen))

    def _last(self, folder: RunFolder, fleet: Path) -> Path:
        """The checkpoint of the version that is active in the end, as a robot would have it."""
        key = folder.path / "certificates/authority" / PUBLIC_KEY
        spec = servable_spec(load_policy(folder.checkpoint("imitation")))
        registry = Registry(fleet / REGISTRY)
        active = registry.releases.active
        assert active is not None, "the first policy was promoted when the server began"
        cache = PolicyCache(folder.path / "deployed", TrustedKeys([key.read_bytes()]))
        return cache.fetch(active, spec_hash(spec), registry).folder

    def _tried(self, policy: Path) -> Rate:
        """How a robot alone does with ``policy`` on the test's scenes, through its supervisor."""
        execution = drive.execution("receding_horizon", _STEPS, 1.0)
        settings = drive.EpisodesConfig(str(policy), self.test, self.seed, execution, scenes="test")
        played = drive.drive(drive.robot_config(drive.SIMULATED), settings, None, console)
        return Rate.of(np.arange(self.test) < played.outcomes["success"])


def _certificates(folder: Path, names: list[str]) -> Path:
    """A fleet's folder of certificates, made where it is not there."""
    if not (folder / "authority").exists():
        Authority.create(folder)
    for name in names:
        if not (folder / "robots" / name).exists():
            Authority(folder).robot(name)
    return folder


def _remark(server: FleetServer, seen: dict[str, Any]) -> str:
    recent, version = [success for _, success in seen["recent"]][-100:], server.registry.releases.active
    return f"version {version}" + (f", success {np.mean(recent):.0%}" if recent else "")


def _ended(ledger: Ledger) -> Counter[str]:
    """How many episodes of each robot are stored."""
    return Counter(record.robot for _, record in records(ledger) if record.kind == "episode_end")


def _counted(server: FleetServer) -> dict[str, Any]:
    """What is stored, once the server has counted all of it."""
    stored = _ended(server.ledger).total()
    while (seen := server.status.snapshot())["total"]["episodes"] < stored:
        time.sleep(_LOOK_S)
    total = seen["total"]
    counts = {name: total[name] for name in ("episodes", "successes", "steps", "intervened")}
    learner = {name: int(seen["learner"].get(name, 0)) for name in ("updates", "episodes")}
    return {
        "records": server.ledger.position,
        "robots": seen["robots"],
        **counts,
        "learner": learner,
        "alarms": [one["sentence"] for one in seen["alarms"]],
    }


WINDOW = 60  # episodes that a point of a curve is of
_RESCUED, _ALONE = 2, 3  # clips: a row
_FRAME, _PERSONS = 2, (255, 160, 0)  # pixels around a picture in which a person acts, and their colour


@dataclass(frozen=True)
class Played:
    """An episode that the ledger holds the end of, at ``position``."""

    position: int
    robot: str
    version: int
    end: EpisodeEnd

    @property
    def alone(self) -> bool:
        """Whether the robot succeeded without a person."""
        return self.end.success and not self.end.intervened


def write_report(folder: RunFolder, summary: JsonMapping, ledger: Ledger, registry: Registry) -> None:
    """Write ``report.html`` from the ``summary`` and what the fleet's ``ledger`` and ``registry`` hold."""
    played = list(played_in(ledger))
    before, after = Rate(**summary["imitation"]), Rate(**summary["fleet"])
    report = Report(
        f"{before.success:.0%} by imitation, {after.success:.0%} after the fleet's practice",
        f"{len(summary['robots'])} simulated arms, scripted people who correct them, one server, one learner, one "
        "machine",
    )
    share = summary["intervened"] / max(1, summary["steps"])
    tested = f"{before.episodes} test scenes, alone"
    report.tiles(
        [
            Tile.of("Imitation", before, tested),
            Tile.of("After the fleet's practice", after, tested, "good"),
            Tile("People's share of the control steps", share, note=f"of {summary['steps']:,}"),
        ]
    )
    report.text(
        f"Robots played {summary['episodes']:,} episodes, each with the version that the server wanted. A person "
        f"who saw one fail took over, and the learner imitated what the person did: {summary['learner']['updates']:,} "
        f"updates. The server acknowledged {summary['records']:,} records, each after it was on its disk. Both "
        "policies were then tried on the same scenes, which nothing was learnt from. Intervals are 95 %, of each "
        "policy by itself."
    )
    _curves(report, played)
    _tables(report, summary, played, registry)
    _clips(report, ledger, played)
    report.command(f"vla-rl fleet demo --seed {summary['seed']}")
    report.write(folder.path / "report.html")


def played_in(ledger: Ledger) -> Iterator[Played]:
    """All episodes whose ends can be read, in the order in which the server got those."""
    for position, record in records(ledger):
        if record.kind == "episode_end":
            try:
                end = EpisodeEnd.from_payload(record.payload)
            except ContractError:  # the server's page named it
                continue
            yield Played(position, record.robot, record.policy_version, end)


def windows(played: Sequence[Played], size: int) -> Iterator[tuple[int, Rate, float]]:
    """For every ``size`` episodes in a row: how many there were by then, success alone, people's share of the steps.

    They overlap by three quarters.
    """
    step = max(1, size // 4)
    for end in range(min(size, len(played)), len(played) + 1, step):
        some = played[max(0, end - size) : end]
        steps = sum(one.end.steps for one in some)
        yield end, Rate.of([one.alone for one in some]), sum(one.end.intervened for one in some) / max(1, steps)


def _curves(report: Report, played: Sequence[Played]) -> None:
    if not played:
        return
    ends, rates, shares = zip(*windows(played, WINDOW), strict=True)
    low, high = ([getattr(rate, bound) for rate in rates] for bound in ("low", "high"))
    report.section("While the robots practised", f"Each point is of {WINDOW} episodes in a row, of all robots.")
    alone = Series("all robots", ends, [rate.success for rate in rates], low, high)
    report.curves("Success without a person", "episodes", "success", [alone], percent=True)
    report.curves("People's share of the control steps", "episodes", "share", [Series("", ends, shares)], percent=True)


def _tables(report: Report, summary: JsonMapping, played: Sequence[Played], registry: Registry) -> None:
    report.section("Versions", "Success without a person. A new version is tried by some robots before all have it.")
    stages = registry.releases.stages
    rows: list[list[Cell]] = []
    for version in sorted({*stages, *(one.version for one in played)}):
        some = [one for one in played if one.version == version]
        rate = percent(Rate.of([one.alone for one in some])) if some else None
        rows.append([version, stages.get(version, "unknown"), len(some), rate])
    report.table(["version", "in the end", "episodes", "success alone"], rows)
    report.section("Robots")
    robots: list[list[Cell]] = []
    for name, one in summary["robots"].items():
        own = [item for item in played if item.robot == name]
        rate = percent(Rate.of([item.alone for item in own])) if own else None
        robots.append([name, len(own), rate, f"{one['intervened'] / max(1, one['steps']):.1%}", one["records"]])
    report.table(["robot", "episodes", "success alone", "a person's steps", "records stored"], robots)
    for sentence in summary["alarms"]:
        report.text(f"Alarm: {sentence}")


def _clips(report: Report, ledger: Ledger, played: Sequence[Played]) -> None:
    rescued = [one for one in played if one.end.success and one.end.intervened]
    alone = [one for one in reversed(played) if one.alone]
    chosen = {one.position: one for one in (*islice(rescued, _RESCUED), *islice(alone, _ALONE))}
    reader, clips = EpisodeReader(), list[Clip]()
    for position, record in records(ledger):
        if position not in chosen:
            (reader.skip if record.kind == "episode_end" else reader.add)(record)
        elif (episode := reader.add(record)) is not None and episode.spec.images:
            clips.append(_clip(episode, chosen[position]))
    if clips:
        report.section("Episodes", "Orange frame: a person has control.")
        report.videos("", clips)


def _clip(episode: FleetEpisode, one: Played) -> Clip:
    """What the first camera saw."""
    camera = next(iter(episode.spec.images))
    frames = np.stack([np.repeat(one, 3 // one.shape[2], 2) for one in (step.images[camera] for step in episode.steps)])
    person = np.array(episode.intervened)
    for rows in (np.s_[:_FRAME], np.s_[-_FRAME:]):
        frames[person, rows] = _PERSONS
        frames[person, :, rows] = _PERSONS
    who = f"a person in {person.mean():.0%}" if person.any() else "alone"
    return Clip(frames, f"{one.robot}, version {one.version}, {who}", one.end.success, 1 / episode.spec.control_dt)


_NICE = 10  # the learner and the server come first
_PATIENCE_S = 10.0  # at the end
_SEEDS, _STRIDE = 100, 7  # of training runs: robots that practise in different scenes; without a common divisor


class RobotProcesses:
    """One process per robot, ``vla-rl robot run simulated --server ADDRESS`` with a scripted person beside it.

    Each has what it keeps in ``folder``: its spool and its policies in ``runs``, and its log.  ``certificates`` is the
    fleet's folder of them; ``episodes`` is how many each is to play.  Raises UserError when one ends with an error.
    """

    def __init__(self, folder: Path, address: str, certificates: Path, episodes: Mapping[str, int], seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = {name: folder / f"{name}.log" for name in episodes}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.paused = False
        for number, (name, count) in enumerate(episodes.items()):
            credentials = (certificates / "robots" / name).resolve()
            given = {
                "server": address,
                "credentials": str(credentials),
                "episodes": str(count),
                "speed": "1",
                "seed": str((seed + _STRIDE * number) % _SEEDS),
            }
            options = [f"--{option}={value}" for option, value in given.items()]
            command = [sys.executable, "-m", "vla_rl.cli", "robot", "run", "simulated", "--person", *options]
            self._processes[name] = _started(command, folder, self._logs[name])

    @property
    def running(self) -> bool:
        """Whether any of them still plays."""
        ended = {name: process.poll() for name, process in self._processes.items()}
        for name, code in ended.items():
            if code:
                raise UserError(
                    f"robot {name} ended with exit code {code}, so its part is missing; the end of its log "
                    f"{self._logs[name]}: {self._last(name)}"
                )
        return None in ended.values()

    def pause(self, paused: bool) -> None:
        """Let them stand still, or go on; their time is virtual, so that they notice nothing but a late server."""
        if paused != self.paused:
            self.paused = paused
            for process in self._processes.values():
                process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End those that still play; what they have not sent is on their disks.  Safe to call twice."""
        for process in self._processes.values():
            process.terminate()
        self.pause(False)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            process.kill()
            process.wait()

    def _last(self, name: str) -> str:
        lines = self._logs[name].read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")


def _started(command: list[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    with log.open("ab") as out:
        # Ctrl-C is for whoever started them, who then ends them.  In sessions of their own, nice does not count.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    return process
