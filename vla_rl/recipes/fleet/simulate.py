"""What a fleet would learn, before its robots are bought: fleets of several sizes in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import Checked, JsonObject, above_zero, at_least, check_limits, check_positive
from vla_rl.contract.env import VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Mode, Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Cell, Report, Tile, percent
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.driver import Decision, Driver
from vla_rl.experience.intervention import DemonstratedEnv, DemonstratorConfig, People, PersonConfig, SupervisedEnv
from vla_rl.experience.rollout import episode_column
from vla_rl.experience.sources import acting_copy
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, Evaluator
from vla_rl.recipes.fleet.learners import FleetLearner, FleetMethod
from vla_rl.recipes.metrics import curve_of
from vla_rl.recipes.policies import start_policy
from vla_rl.recipes.terminal import bar, clock, console
from vla_rl.recipes.trainers import Trainable
from vla_rl.training.device import alone
from vla_rl.training.tracking import RunFolder

SECOND = 1_000_000  # microseconds
NEVER = 2**62
# Of events at the same moment: what arrives is learnt from before a publication, which robots and validations see.
ARRIVAL, PUBLICATION, ROBOT, VALIDATION = range(4)


def micros(seconds: float) -> int:
    """Microseconds."""
    return round(seconds * SECOND)


def steps_due(time: int, per_second: float) -> int:
    """How many events of a steady rate have happened by ``time``, microseconds; exact for rates in millionths."""
    return time * micros(per_second) // SECOND**2


class Timeline:
    """Runs events in the order of their time, then of their kind, then as they were added."""

    def __init__(self) -> None:
        self.now = 0  # microseconds
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, time: int, kind: int, event: Callable[[], None]) -> None:
        """``event()`` happens at ``time``; raises ContractError for a time that has passed."""
        if time < self.now:
            raise ContractError(
                f"an event was set for {time} us of virtual time and it is {self.now} us already, so it would never "
                "happen; set it for now or later."
            )
        heapq.heappush(self._events, (time, kind, self._added, event))
        self._added += 1

    def run(self, until: int) -> None:
        """Let happen what is due by ``until``, that moment included."""
        while self._events and self._events[0][0] <= until:
            self.now, _, _, event = heapq.heappop(self._events)
            event()
        self.now = until


@dataclass(frozen=True)
class OutageConfig(Checked):
    """How often something goes down, and for how long; both are exponentially distributed."""

    per_hour: float = at_least(0.0, 0)  # of the time that it is up
    seconds: float = above_zero(60.0)  # mean length


class Outages:
    """The outages of one thing, drawn from ``generator`` in their order, so that they depend on nothing else."""

    def __init__(self, config: OutageConfig, generator: np.random.Generator) -> None:
        self.config, self._generator = config, generator
        self._begin, self._end = NEVER, NEVER
        self._draw(0)

    def next(self, time: int) -> tuple[int, int]:
        """Begin and end of the outage at ``time``, or of the first one after; ``time`` must not fall between calls."""
        while self._end <= time:
            self._draw(self._end)
        return self._begin, self._end

    def over(self, time: int) -> int:
        """``time``, or the end of the outage that there is then."""
        begin, end = self.next(time)
        return end if begin <= time else time

    def _draw(self, after: int) -> None:
        if not self.config.per_hour:
            return
        up = micros(self._generator.exponential(3600.0 / self.config.per_hour))
        self._begin = after + up
        self._end = self._begin + max(1, micros(self._generator.exponential(self.config.seconds)))


@dataclass(frozen=True)
class FleetTimes(Checked):
    """How long everything takes, in seconds of virtual time; control steps take the environment's ``control_dt``.

    A robot that is ``broken`` stands still: the episode that it was in is lost, for nobody knows how it would have
    ended, and the next one begins after the repair and a reset.  One that is ``offline`` goes on with the policy that
    it has; its episodes wait on its disk and are uploaded, each once, when the link is back.
    """

    decision: float = at_least(0.1, 0)  # from an observation to the first action of its chunk; the robot waits
    reset: float = at_least(3.0, 0)  # between two episodes
    upload: float = at_least(2.0, 0)  # from an episode's end to the learner
    download: float = at_least(2.0, 0)  # from a publication until a robot can take it, between two of its episodes
    sync: float = above_zero(20.0)  # between two publications
    updates_per_second: float = at_least(5.0, 0)  # gradient steps; none while there is nothing to learn from
    broken: OutageConfig = OutageConfig()
    offline: OutageConfig = OutageConfig()


class VirtualReleases:
    """The versions of the policy that were published, as long as a robot could still take them."""

    def __init__(self, policy: Policy) -> None:
        """``policy`` is the first version; every robot has it from the beginning."""
        self._released = [(-(2**62), acting_copy(policy))]

    @property
    def newest(self) -> Policy:
        """The version that was published last."""
        return self._released[-1][1]

    def publish(self, time: int, policy: Policy) -> None:
        """A copy of ``policy`` from ``time`` on, under the next version's number."""
        policy.version += 1
        self._released.append((time, acting_copy(policy)))

    def by(self, time: int) -> Policy:
        """The newest one that was published by ``time``, which must not fall between calls."""
        while len(self._released) > 1 and self._released[1][0] <= time:
            del self._released[0]
        return self._released[0][1]


@dataclass
class Counts:
    """What a robot, or a fleet, has done."""

    episodes: int = 0  # that ended
    successes: int = 0  # of them, rescued ones included
    lost: int = 0  # episodes that the robot broke in
    steps: int = 0  # control steps, those of lost episodes included
    person: int = 0  # of them, those in which a person acted
    swaps: int = 0  # to a newer policy

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def share(self) -> float:
        """The person's share of the control steps."""
        return self.person / max(1, self.steps)


class VirtualRobot:
    """One robot, ``env`` with one row: resets, decides, executes, breaks down, uploads.

    Everything random about it follows from ``seed`` and ``number``: its outages, and the noise of its policy.  It acts
    as it would be deployed (``mode`` "eval") or explores.  After a decision in which a person acted, the policy's state
    begins anew, as on a robot: none of its chunks counts any more.
    """

    def __init__(
        self,
        number: int,
        env: VecEnv,
        seeds: Iterator[int],
        releases: VirtualReleases,
        times: FleetTimes,
        timeline: Timeline,
        deliver: Callable[[Rollout], None],
        seed: int,
        mode: Mode = "eval",
    ) -> None:
        """``deliver(episode)`` is called when an episode has reached the learner."""
        self.name, self.env, self.seeds, self.releases = f"robot-{number}", env, seeds, releases
        self.times, self.timeline, self.deliver, self.counts = times, timeline, deliver, Counts()
        kinds = (np.random.default_rng([seed, number, kind]) for kind in range(3))
        self.broken, self.offline = Outages(times.broken, next(kinds)), Outages(times.offline, next(kinds))
        noise = torch.Generator().manual_seed(int(next(kinds).integers(2**62)))
        self.driver = Driver(env, releases.by(timeline.now), [noise], mode)
        self._decisions: list[Decision] = []
        self._dt = micros(env.spec.control_dt)
        timeline.at(timeline.now, ROBOT, self.begin)

    def begin(self) -> None:
        """An episode with the newest policy that the robot can have; a broken one is repaired first."""
        now, times = self.timeline.now, self.times
        if (repaired := self.broken.over(now)) > now:
            self.timeline.at(repaired, ROBOT, self.begin)
            return
        if self.offline.over(now) == now:
            newest = self.releases.by(now - micros(times.download))
            self.counts.swaps += newest.version > self.driver.policy.version
            self.driver.policy = newest
        self._decisions = []
        self.driver.reset(np.zeros(1, np.int64), np.array([next(self.seeds)]))
        self.decide()

    def decide(self) -> None:
        """One decision: what the robot does until the next one, or until it breaks."""
        decision, now = self.driver.step(), self.timeline.now
        valid, first = decision.host.valid[0], now + micros(self.times.decision)
        end = first + int(valid.sum()) * self._dt
        breaks, repaired = self.broken.next(now)
        executed = np.arange(len(valid)) < max(0, (min(end, breaks) - first) // self._dt)
        self.counts.steps += int((valid & executed).sum())
        self.counts.person += int((on_host(decision.step.intervened)[0] & valid & executed).sum())
        if on_host(decision.step.intervened).any():
            self.driver.state = self.driver.policy.reset_state(self.driver.state, np.zeros(1, np.int64))
        self._decisions.append(decision.without_pictures())
        if breaks < end:
            self.counts.lost += 1
            self.timeline.at(repaired + micros(self.times.reset), ROBOT, self.begin)
        else:
            self.timeline.at(end, ROBOT, self.end if decision.host.done[0] else self.decide)

    def end(self) -> None:
        """Send the episode, and make room for the next one."""
        last, now = self._decisions[-1], self.timeline.now
        self.counts.episodes += 1
        self.counts.successes += int(last.host.success[0])
        final = None
        if last.host.truncated[0]:
            final = {name: item[0] for name, item in self.driver.final_features(np.zeros(1, np.int64)).items()}
        episode = episode_column(self._decisions, 0, int(last.seeds[0]), final, self.name)
        sent = self.offline.over(now) + micros(self.times.upload)
        self.timeline.at(sent, ARRIVAL, lambda: self.deliver(episode))
        self.timeline.at(now + micros(self.times.reset), ROBOT, self.begin)


class VirtualLearner:
    """The learner that all robots share: a fixed number of gradient steps a second, a publication every ``sync``.

    A step that is due at some moment learns from what has arrived by then.
    """

    def __init__(self, learner: FleetLearner, releases: VirtualReleases, times: FleetTimes, timeline: Timeline) -> None:
        self.learner, self.releases, self.times, self.timeline = learner, releases, times, timeline
        self.received, self.publications = 0, 0
        self.metrics: dict[str, float] = {}
        self._due = steps_due(timeline.now, times.updates_per_second)
        timeline.at(timeline.now + micros(times.sync), PUBLICATION, self.publish)

    def receive(self, episode: Rollout) -> None:
        """Learn from what was there until now, and from ``episode`` as well from now on."""
        self.catch_up()  # without it
        self.learner.add(episode)
        self.received += 1

    def publish(self) -> None:
        self.catch_up()
        self.releases.publish(self.timeline.now, self.learner.policy)
        self.publications += 1
        self.timeline.at(self.timeline.now + micros(self.times.sync), PUBLICATION, self.publish)

    def catch_up(self) -> None:
        """Take the gradient steps that are due."""
        due = steps_due(self.timeline.now, self.times.updates_per_second)
        if due > self._due:
            self.metrics = self.learner.learn(due - self._due) or self.metrics
        self._due = due


class VirtualFleet:
    """A robot for each of ``envs``, which have one row each, and the ``learner``, for whoever runs the ``timeline``.

    ``seeds`` are those of the robots' episodes, as they begin.
    """

    def __init__(
        self,
        envs: list[VecEnv],
        learner: FleetLearner,
        times: FleetTimes,
        seeds: Iterator[int],
        seed: int,
        mode: Mode = "eval",
    ) -> None:
        self.timeline, self.releases = Timeline(), VirtualReleases(learner.policy)
        self.learner = VirtualLearner(learner, self.releases, times, self.timeline)
        given = (seeds, self.releases, times, self.timeline, self.learner.receive, seed, mode)
        self.robots = [VirtualRobot(number, env, *given) for number, env in enumerate(envs)]

    @property
    def counts(self) -> Counts:
        return sum((robot.counts for robot in self.robots), Counts())

    def close(self) -> None:
        for robot in self.robots:
            robot.env.close()


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
        episodes = load_demonstrations(self.demonstrations).for_env(self.env.spec())
        learner = self.method.build(self.start(), episodes, self.seed)
        envs = self.person.watch([self.env.make_training(1) for _ in range(robots)], self.env)
        block = seed_ranges.training_seeds(self.seed, "reinforcement")
        seeds = SeedStream(block.start, block.stop)
        with closing(VirtualFleet(envs, learner, self.times, seeds, self.seed, self.method.mode)) as fleet:
            yield fleet


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
        success.append(curve_of(name, lines, "step", "eval/success", "eval/low", "eval/high"))
        share.append(curve_of(name, lines, "step", "fleet/person_share"))
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
class Corrects(Checked):
    """Takes over where a robot visibly fails, and keeps to ``max_share`` on every robot.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    people    who watch all robots together, each with one robot at a time; 0: every robot has a person of its own
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    people: int = at_least(0, 0)

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        people, expert = People(self.people or len(envs)), config.make_expert().act
        return [SupervisedEnv(env, expert, load(self.progress), self.person, people) for env in envs]


@dataclass(frozen=True)
class Demonstrates:
    """Does whole episodes from their beginning, ``demonstrator.steps`` control steps in the whole fleet."""

    demonstrator: DemonstratorConfig = field(default_factory=DemonstratorConfig)

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        own = replace(self.demonstrator, steps=self.demonstrator.steps // len(envs))
        return [DemonstratedEnv(env, config.make_expert().act, own) for env in envs]
