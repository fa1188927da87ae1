"""A fleet on one machine: simulated robots, a server, a learner beside it, scripted people, and a page about it."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.limits import check_limits
from vla_rl.evaluation.stats import Rate
from vla_rl.fleet.authority import Authority
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.manifest import spec_hash
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.server import LEDGER, REGISTRY, FleetServer, FleetServerConfig
from vla_rl.fleet.signing import TrustedKeys
from vla_rl.fleet.transport import TransportOptions
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.fleet import serving
from vla_rl.recipes.fleet.demo_report import write_report
from vla_rl.recipes.fleet.export import records
from vla_rl.recipes.fleet.learn import Learn
from vla_rl.recipes.fleet.policies import PUBLIC_KEY
from vla_rl.recipes.fleet.robot_processes import RobotProcesses
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import bar, console
from vla_rl.recipes.robots import drive
from vla_rl.recipes.stages import clock
from vla_rl.serving.servable import servable_spec
from vla_rl.training.threads import shared
from vla_rl.training.tracking import RunFolder

_LOOK_S = 0.5  # how often the server's counts are looked at
_AHEAD = 20  # episodes by which robots may be ahead of the learner, which has nothing to learn at first
_STEPS = 8  # actions of a chunk that a tested robot executes


@dataclass(frozen=True)
class FleetDemo:
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
    robots: int = 4
    episodes: int = 100
    updates_per_episode: float = 15.0
    test: int = 100
    page_port: int = 0
    seed: int = 1
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics of the imitation go

    def __post_init__(self) -> None:
        """Raises UserError for counts without meaning."""
        count = (1, math.inf)
        check_limits(self, robots=(1, 64), episodes=count, test=count, page_port=(0, 65535))
        check_limits(self, updates_per_episode=(0, math.inf))

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
