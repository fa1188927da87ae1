"""Play episodes on an arm, show how they go, and keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.decisions import Decide
from robot_drivers.limits import Limits
from robot_drivers.simulated import SimulatedRobot
from robot_drivers.simulated_hardware import SO101
from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import move_aside
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.robots.decide import ExpertDecider, PolicyDecider, hold_position, open_policy
from vla_rl.recipes.robots.person import ScriptedPerson, waiting
from vla_rl.recipes.robots.recording import Recorder, episode_of
from vla_rl.recipes.robots.session import ControlStep, Execution, Session, open_session, outcome_of
from vla_rl.recipes.robots.status import Display

Scenes: TypeAlias = Literal["demonstrations", "reinforcement", "test"]
SIMULATED = "simulated"  # instead of a file: the robot that everybody has
EXPERT = "expert"
_SIMULATED_SO101 = Part("robot_drivers.simulated:SimulatedRobot")


@dataclass(frozen=True)
class EpisodesConfig:
    """Episodes to play.

    policy     checkpoint or run folder; address of a policy server (``vla_rl/serving/access.py``); "expert" for the
               scripted expert of a simulated robot; "" for a person only
    episodes   how many
    seed       of the training run that a recording is for, and of the policy's noise
    execution  how chunks are executed
    real_time  guidance of real-time chunking ("identity", "vjp"), "" for none
    scenes     which scenes a simulated robot plays: those of demonstrations or of practice of that run, or of the test
    person     whether a scripted person watches a simulated robot, and takes over where it fails
    """

    policy: str
    episodes: int
    seed: int
    execution: Execution
    real_time: str = ""
    scenes: Scenes = "demonstrations"
    person: bool = False


@dataclass(frozen=True)
class EpisodesSummary:
    """How episodes went: their ends, control steps, and the share of them whose request was changed."""

    outcomes: Counter[str]
    steps: int
    clipped: int
    intervened: int

    def __str__(self) -> str:
        episodes, success = self.outcomes.total(), self.outcomes["success"]
        low, high = wilson(success, episodes)
        ends = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        clipped, person = (f"{part / max(1, self.steps):.0%}" for part in (self.clipped, self.intervened))
        shares = f"of {self.steps} control steps {clipped} were clipped, {person} a person's"
        return f"success {success / episodes:.1%} [{100 * low:.1f}, {100 * high:.1f}] of {episodes} ({ends}); {shares}"


_CHUNKS = {
    "open_loop": "robot_drivers.chunks:OpenLoop",
    "receding_horizon": "robot_drivers.chunks:RecedingHorizon",
    "temporal_ensembling": "robot_drivers.chunks:TemporalEnsembling",
}


def execution(name: str, steps: int, speed: float, delay: float = 0.0) -> Execution:
    """How chunks are executed; ``steps`` is the horizon of "receding_horizon", ``delay`` is in seconds."""
    return Execution(Part(_CHUNKS[name], {"steps": steps} if name == "receding_horizon" else {}), speed, delay)


def robot_config(name: str) -> RobotConfig:
    """The robot of the file ``name``, or the simulated one."""
    if name != SIMULATED:
        return RobotConfig.load(Path(name))
    limits = Limits.of(SimulatedRobot().spec, margin=0.0)  # it rests at the end of its wrist's range
    return RobotConfig(_SIMULATED_SO101, limits=limits.to_json())


def drive(
    config: RobotConfig,
    settings: EpisodesConfig,
    out: Path | None,
    show: Console,
    through: Callable[[Session], AbstractContextManager[Session]] = nullcontext,
) -> EpisodesSummary:
    """Play episodes and, with ``out``, record them as a LeRobotDataset v3.0; what was there is moved aside.

    ``through`` makes the session that plays of the arm's: one that sends what is played elsewhere, for instance.
    An episode that a person ends with "redo" is played again and not kept.
    """
    with (
        closing(open_session(config, settings.execution, waiting(show), _person(config, settings))) as session,
        _deciding(session, config, settings) as decide,
        through(session) as played,
    ):
        aside = out and move_aside(out)
        if aside:
            show.print(f"an earlier dataset was in {out}; it is now {aside}")
        shown = session.display(show, settings.episodes)
        with Recorder(out) if out else nullcontext() as recorder, shown as display:
            try:
                return _play(played, decide, settings, recorder, display)
            except KeyboardInterrupt as stop:
                kept = f" with {recorder.episodes} episodes recorded in {out}" if recorder else ""
                raise type(stop)(f"stopped{kept}.") from stop


def _play(
    session: Session,
    decide: Decide,
    settings: EpisodesConfig,
    recorder: Recorder | None,
    display: Display,
) -> EpisodesSummary:
    outcomes, steps, clipped, intervened = Counter[str](), 0, 0, 0
    seeds = _seeds(settings)
    number = 0
    while (kept := outcomes.total()) < settings.episodes:
        number += 1
        seed, title = seeds[kept], f"Episode {kept + 1} of {settings.episodes}"
        session.prepare(title)
        seen = _watched(session.play(decide, number, seed), title, display)
        outcome = outcome_of([one.record for one in seen])
        kept += outcome != "redo"
        display.ended(title, [one.record for one in seen], kept, outcomes["success"] + (outcome == "success"))
        if outcome == "redo":
            continue
        if recorder is not None and seen:
            recorder.add(episode_of(seen, session.spec, seed))
        outcomes[outcome] += 1
        steps, clipped = steps + len(seen), clipped + _count(seen, "clipped")
        intervened += sum(one.record.intervened for one in seen)
    return EpisodesSummary(outcomes, steps, clipped, intervened)


def _watched(steps: Iterator[ControlStep], title: str, display: Display) -> list[ControlStep]:
    seen = []
    for step in steps:
        seen.append(step)
        display.step(title, step.record, step.stopped)
    return seen


def _count(seen: Sequence[ControlStep], name: str) -> int:
    return sum(bool(np.any(getattr(one.record, name))) for one in seen)


def _seeds(settings: EpisodesConfig) -> list[int]:
    if settings.scenes == "test":
        return list(seed_ranges.held_out(seed_ranges.TEST, settings.episodes))
    return list(seed_ranges.training_seeds(settings.seed, settings.scenes)[: settings.episodes])


@contextmanager
def _deciding(session: Session, config: RobotConfig, settings: EpisodesConfig) -> Iterator[Decide]:
    """:func:`build_decider`, closed at the end."""
    decide = build_decider(session, config, settings)
    try:
        yield decide
    finally:
        if isinstance(decide, PolicyDecider):
            decide.close()


def build_decider(session: Session, config: RobotConfig, settings: EpisodesConfig) -> Decide:
    """Who decides; raises UserError for a policy that does not fit the arm, and for a server that does not answer."""
    if not settings.policy:
        return hold_position
    if settings.policy == EXPERT:
        return ExpertDecider(_simulated_env(config, "expert").make_expert())
    return decider_of(open_policy(settings.policy, session.spec), settings)


def decider_of(policy: Policy, settings: EpisodesConfig) -> PolicyDecider:
    """``policy`` decides as ``settings`` say; raises UserError for one that real-time chunking cannot guide."""
    import torch

    from vla_rl.policies.flow_policy import FlowPolicy
    from vla_rl.policies.real_time_chunking import RealTimeChunking, RealTimeConfig

    if settings.real_time:
        if not isinstance(policy, FlowPolicy):
            raise UserError(
                f"{settings.policy or 'the policy'} is a {type(policy).__name__} without a velocity field, so "
                "real-time chunking cannot guide it; leave --real-time out."
            )
        policy = RealTimeChunking(policy, RealTimeConfig(settings.real_time))
    return PolicyDecider(policy, torch.Generator().manual_seed(settings.seed))


def _person(config: RobotConfig, settings: EpisodesConfig) -> ScriptedPerson | None:
    return ScriptedPerson.of_task(_simulated_env(config, "person")) if settings.person else None


def _simulated_env(config: RobotConfig, who: str) -> EnvConfig:
    """What a simulated robot plays in; raises UserError for another robot, which no scripted ``who`` can see."""
    if load(config.driver.name) is not SimulatedRobot:
        raise UserError(
            f"the scripted {who} reads a simulator's state, which {config.driver.name} does not have; drive it by a "
            "teleoperator or a policy."
        )
    options = config.driver.options
    return EnvConfig(options.get("env", SO101), dict(options.get("options") or {}))
