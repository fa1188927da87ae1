"""What a fleet would learn, before its robots are bought: fleets of several sizes in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_rl.contract.config import JsonObject, check_limits, check_positive
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Cell, Report, Series, Tile, percent
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.intervention import DemonstratedEnv, DemonstratorConfig, People, PersonConfig, SupervisedEnv
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, Evaluator
from vla_rl.recipes.fleet.learners import FleetMethod
from vla_rl.recipes.fleet.virtual import SECOND, VALIDATION, FleetTimes, VirtualFleet, micros, virtual_fleet
from vla_rl.recipes.policies import start_policy
from vla_rl.recipes.terminal import bar, clock, console
from vla_rl.recipes.trainers import Trainable
from vla_rl.training.device import alone
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Simulate:
    """Fleets of simulated robots in virtual time that learn from a checkpoint: the checkpoints "robots-N".

    The same seed gives the same run, bit for bit.  Every fleet starts from the same policy and the same demonstrations.

    robots   sizes of the fleets, one after the other
    seconds  of virtual time, for each
    target   success of which the virtual time is told
    """

    method: FleetMethod
    person: PersonFactory
    policy: str  # the checkpoint that all robots begin with
    demonstrations: str  # the dataset that it has imitated
    robots: tuple[int, ...] = (4,)
    seconds: float = 600.0
    times: FleetTimes = field(default_factory=FleetTimes)
    validate_every: float = 60.0  # seconds of virtual time
    target: float = 0.8
    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_positive(self, "seconds", "validate_every")
        check_limits(self, target=(0, 1))
        if not self.robots or min(self.robots) < 1 or len(set(self.robots)) < len(self.robots):
            raise UserError(
                f"robots is {self.robots}, so there is nothing to simulate; give different numbers of at least 1."
            )

    def run(self, folder: RunFolder) -> JsonObject:
        """Simulate every fleet, then play the test seeds with what it has learnt and with what it began with."""
        seconds: dict[str, float] = {}
        fleets = {}
        with closing(self.evaluation.evaluator(self.env)) as evaluator:
            before = self.play(evaluator, self.start(), seed_ranges.TEST, self.evaluation.test)
            for robots in self.robots:
                with clock(seconds, f"robots-{robots}"):
                    fleets[str(robots)] = self.simulate(robots, evaluator, folder)
        largest = fleets[str(self.robots[-1])]
        summary = {
            "before": asdict(before.rate),
            "before_families": _families(before),
            "after": largest["test"],
            "fleets": fleets,
            "seed": self.seed,
            "seconds": seconds,
        }
        write_report(folder, summary, self.target)
        for name, found in fleets.items():
            console.print(
                f"{name} robots: {before.rate.success:.1%} -> {found['test']['success']:.1%} on test seeds, a person "
                f"in {found['share']:.1%} of the steps"
            )
        return summary

    def start(self) -> Trainable:
        """The policy that all robots begin with; raises UserError when none was named."""
        found = start_policy(self.policy, self.env, self.seed, VLAOptions())
        if found is None:
            raise UserError("a fleet begins with a policy and none was named; add --policy with a checkpoint folder.")
        return found

    def play(self, evaluator: Evaluator, policy: Policy, seeds: range, count: int) -> Outcomes:
        """``count`` held-out episodes."""
        return evaluator.evaluate(policy, seed_ranges.held_out(seeds, count), self.seed)

    def simulate(self, robots: int, evaluator: Evaluator, folder: RunFolder) -> JsonObject:
        """One fleet; returns what it has done and learnt."""
        stage = f"robots-{robots}"
        with self.fleet(robots) as fleet, bar(stage, math.ceil(self.seconds)) as update, alone():
            reached: list[float] = []

            def validate() -> None:
                now = fleet.timeline.now
                rate = self.play(
                    evaluator, fleet.releases.newest, seed_ranges.VALIDATION, self.evaluation.validation
                ).rate
                if rate.success >= self.target and not reached:
                    reached.append(now / SECOND)
                folder.log(stage, now // SECOND, _metrics(fleet, rate))
                update(now // SECOND, f"success {rate.success:.0%}, person {fleet.counts.share:.0%}")
                fleet.timeline.at(now + micros(self.validate_every), VALIDATION, validate)

            fleet.timeline.at(0, VALIDATION, validate)
            fleet.timeline.run(micros(self.seconds))
            last = fleet.releases.newest
            test = self.play(evaluator, last, seed_ranges.TEST, self.evaluation.test)
            save_own(last, folder.checkpoint(stage))  # type: ignore[arg-type]  # a Trainable was published
            return {
                "test": asdict(test.rate),
                "families": _families(test),
                "seconds_to_target": reached[0] if reached else None,
                **asdict(fleet.counts),
                "share": fleet.counts.share,
                "received": fleet.learner.received,
                "publications": fleet.learner.publications,
            }

    @contextmanager
    def fleet(self, robots: int) -> Iterator[VirtualFleet]:
        """A new fleet of so many robots."""
        episodes = load_demonstrations(Path(self.demonstrations)).with_tasks(self.env.spec().tasks)
        learner = self.method.build(self.start(), episodes, self.seed)
        envs = self.person.watch([self.env.make_training(1) for _ in range(robots)], self.env)
        block = seed_ranges.training_seeds(self.seed, "reinforcement")
        seeds = SeedStream(block.start, block.stop)
        fleet = virtual_fleet(envs, learner, self.times, seeds, self.seed, self.method.mode)
        try:
            yield fleet
        finally:
            fleet.close()


def _metrics(fleet: VirtualFleet, rate: Rate) -> dict[str, float]:
    counts = fleet.counts
    done = {f"fleet/{name}": float(value) for name, value in asdict(counts).items()}
    return {
        "eval/success": rate.success,
        "eval/low": rate.low,
        "eval/high": rate.high,
        "fleet/person_share": counts.share,
        **done,
        **fleet.learner.metrics,
    }


def _families(outcomes: Outcomes) -> JsonObject:
    return {name: asdict(rate) for name, rate in outcomes.families.items()}


_COLUMNS = ("robots", "success, test", "time to {target:.0%}", "person's steps", "of all", "episodes", "lost")


def write_report(folder: RunFolder, summary: JsonObject, target: float) -> None:
    """Write ``report.html`` from the ``summary`` and the metrics of the run."""
    report = Report("A fleet in virtual time", "What robots, a person and one learner would achieve together.")
    before = Rate(**summary["before"])
    tiles = [Tile.of("before", before, f"{before.episodes} test episodes")]
    rows: list[list[Cell]] = []
    success, share = [], []
    for robots, found in summary["fleets"].items():
        rate, name = Rate(**found["test"]), f"{robots} robots"
        tiles.append(Tile.of(name, rate, f"{rate.episodes} test episodes"))
        reached = found["seconds_to_target"]
        when = "not reached" if reached is None else f"{reached:.0f} s"
        counts: list[Cell] = [found["person"], f"{found['share']:.1%}", found["episodes"], found["lost"]]
        rows.append([int(robots), percent(rate), when, *counts])
        lines = folder.metrics(f"robots-{robots}")
        seconds = [line["step"] for line in lines]
        bounds = ([line[f"eval/{end}"] for line in lines] for end in ("low", "high"))
        success.append(Series(name, seconds, [line["eval/success"] for line in lines], next(bounds), next(bounds)))
        share.append(Series(name, seconds, [line["fleet/person_share"] for line in lines]))
    report.tiles(tiles)
    report.table([column.format(target=target) for column in _COLUMNS], rows)
    report.curves("Success on validation seeds", "virtual seconds", "success", success, percent=True)
    report.curves("The person's share of all control steps so far", "virtual seconds", "share", share, percent=True)
    report.command(f"vla-rl inspect {folder.path}")
    report.write(folder.path / "report.html")


class PersonFactory(Protocol):
    """The frozen dataclass of somebody who acts on a robot at times."""

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """``envs``, the robots of a fleet that ``config`` has made, with that person."""


@dataclass(frozen=True)
class Corrects:
    """Takes over where a robot visibly fails, and keeps to ``max_share`` on every robot.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    people    who watch all robots together, each with one robot at a time; 0: every robot has a person of its own
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    people: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for fewer people than none."""
        check_limits(self, people=(0, math.inf))

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        people = People(self.people or len(envs))
        expert, progress = config.make_expert().act, _progress(self.progress)
        return [SupervisedEnv(env, expert, progress, self.person, people) for env in envs]


@dataclass(frozen=True)
class Demonstrates:
    """Does whole episodes from their beginning, ``demonstrator.steps`` control steps in the whole fleet."""

    demonstrator: DemonstratorConfig = field(default_factory=DemonstratorConfig)

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        own = replace(self.demonstrator, steps=self.demonstrator.steps // len(envs))
        return [DemonstratedEnv(env, config.make_expert().act, own) for env in envs]


class Progress(Protocol):
    """How far the tasks have come."""

    def __call__(self, obs: Observation) -> np.ndarray:
        """[E] from 0 to 1."""


def _progress(name: str) -> Progress:
    found: Progress = load(name)
    return found
