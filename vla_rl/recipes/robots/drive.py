"""Play episodes on an arm, show how they go, and keep them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.limits import Limits
from robot_drivers.record import SOURCES, ControlStep, Decide, Decision, Query, Record
from robot_drivers.safety import REASONS
from robot_drivers.simulated import SO101, SimulatedRobot
from vla_rl.contract.env import EnvSpec, Observation, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy, continue_chunk, encode_observation
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import Recording, move_aside
from vla_rl.experience.demonstrations import Demonstrations, concatenated
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.robots.person import Display, ScriptedPerson, waiting
from vla_rl.recipes.robots.session import Execution, Session, open_session, outcome_of

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
    "open_loop": "robot_drivers.executor:OpenLoop",
    "receding_horizon": "robot_drivers.executor:RecedingHorizon",
    "temporal_ensembling": "robot_drivers.executor:TemporalEnsembling",
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
    person = ScriptedPerson.of_task(_simulated_env(config, "person")) if settings.person else None
    with (
        closing(open_session(config, settings.execution, waiting(show), person)) as session,
        _deciding(session, config, settings) as decide,
        through(session) as played,
    ):
        if out:
            move_aside(out, show.print)
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
    seeds, number = _seeds(settings), 0
    while (kept := outcomes.total()) < settings.episodes:
        number += 1
        seed, title = seeds[kept], f"Episode {kept + 1} of {settings.episodes}"
        session.prepare(title)
        seen: list[ControlStep] = []
        for step in session.play(decide, number, seed):
            seen.append(step)
            display.step(title, step.record, step.stopped)
        records = [one.record for one in seen]
        outcome = outcome_of(records)
        kept += outcome != "redo"
        display.ended(title, records, kept, outcomes["success"] + (outcome == "success"))
        if outcome == "redo":
            continue
        if recorder is not None and seen:
            recorder.add(episode_of(seen, session.spec, seed))
        outcomes[outcome] += 1
        steps, clipped = steps + len(seen), clipped + sum(bool(record.clipped.any()) for record in records)
        intervened += sum(record.intervened for record in records)
    return EpisodesSummary(outcomes, steps, clipped, intervened)


def _seeds(settings: EpisodesConfig) -> list[int]:
    if settings.scenes == "test":
        return list(seed_ranges.held_out(seed_ranges.TEST, settings.episodes))
    return list(seed_ranges.training_seeds(settings.seed, settings.scenes)[: settings.episodes])


def _deciding(session: Session, config: RobotConfig, settings: EpisodesConfig) -> AbstractContextManager[Decide]:
    """:func:`build_decider`, closed at the end."""
    decide = build_decider(session, config, settings)
    return closing(decide) if isinstance(decide, PolicyDecider) else nullcontext(decide)


def build_decider(session: Session, config: RobotConfig, settings: EpisodesConfig) -> Decide:
    """Who decides; raises UserError for a policy that does not fit the arm, and for a server that does not answer."""
    if not settings.policy:
        return hold_position
    if settings.policy == EXPERT:
        expert = _simulated_env(config, "expert").make_expert()
        return lambda query: Decision(np.asarray(expert.act(query.obs))[0])
    return decider_of(open_policy(settings.policy, session.spec), settings)


def decider_of(policy: Policy, settings: EpisodesConfig) -> PolicyDecider:
    """``policy`` decides as ``settings`` say; raises UserError for one that real-time chunking cannot guide."""
    import torch

    from vla_rl.policies.real_time_chunking import in_real_time

    policy = in_real_time(policy, settings.real_time, settings.policy or "the policy")
    return PolicyDecider(policy, torch.Generator().manual_seed(settings.seed))


def _simulated_env(config: RobotConfig, who: str) -> EnvConfig:
    """What a simulated robot plays in; raises UserError for another robot, which no scripted ``who`` can see."""
    if load(config.driver.name) is not SimulatedRobot:
        raise UserError(
            f"the scripted {who} reads a simulator's state, which {config.driver.name} does not have; drive it by a "
            "teleoperator or a policy."
        )
    options = config.driver.options
    return EnvConfig(options.get("env", SO101), dict(options.get("options") or {}))


class PolicyDecider:
    """A policy on one arm, chunk after chunk; its state begins anew where the runtime says that no chunk counts.

    An episode may end while a decision is made; the first one of the next episode then waits for it.
    """

    def __init__(self, policy: Policy, generator: Any) -> None:
        """``generator`` draws the noise of its chunks."""
        self.policy, self._generator = policy, generator
        self._state = policy.initial_state(1)
        self._deciding = threading.Lock()

    def __call__(self, query: Query) -> Decision:
        """The chunk [H,D] for what ``query`` sees."""
        with self._deciding:
            self._state = self._continued(query)
            features, state = encode_observation(self.policy, query.obs, self._state, self._generator)
            out, self._state = self.policy.act(features, state, "eval", self._generator)
            self._horizon = out.action.shape[1]
            return Decision(on_host(out.action)[0], self.policy.version)

    def close(self) -> None:
        """End the connection of a policy that lives in a server; safe to call twice."""
        close = getattr(self.policy, "close", None)
        if close is not None:
            close()

    def _continued(self, query: Query) -> Any:
        """The state with what became of the last chunk."""
        if query.consumed is None:
            return self.policy.reset_state(self._state, np.zeros(1, np.int64))
        steps = query.consumed  # a late query has less of a delay to bridge
        delay = max(0, min(query.delay, steps, self._horizon - steps))
        return continue_chunk(self.policy, self._state, np.zeros(1, np.int64), np.array([steps]), np.array([delay]))


def open_policy(name: str, spec: EnvSpec) -> Policy:
    """The policy of a checkpoint, a run or a server's address, for an arm like ``spec``; raises UserError."""
    from vla_rl.policies.pretrained import load_policy
    from vla_rl.recipes.policies import remote_policy
    from vla_rl.serving.access import names_server

    return remote_policy(name, spec) if names_server(name) else load_policy(name, spec)


def hold_position(query: Query) -> Decision:
    """Stay where the arm is, until a person takes over."""
    return Decision(np.asarray(query.obs.state, np.float64))


_LABEL = "complementary_info."
_NICE = 10  # of the thread that encodes videos: control and policy come first


def episode_of(seen: Sequence[ControlStep], spec: EnvSpec, seed: int) -> Demonstrations:
    """One episode as it was played; ``action`` is what was executed.

    Columns of its own: "intervention" (bool, LeRobot's name for a person in control) and "complementary_info." with
    requested [D], which is the executed position where ``asked`` is False, clipped [D], source (an index into
    ``record.SOURCES``), reason (into ``safety.REASONS``, -1 for others), policy_version, chunk, step_in_chunk,
    latency (s) and captured (s since the episode's first measurement).
    """
    records = [one.record for one in seen]
    action = np.stack([record.executed for record in records]).astype(np.float32)
    obs, success = Observation(**concatenated([one.obs for one in seen])), records[-1].outcome == "success"
    labels = labels_of(records, records[0].captured)
    return Demonstrations.of_episode(spec, obs, action, success, seed, extras=labels)


def labels_of(records: Sequence[Record], start: float) -> dict[str, np.ndarray]:
    """The columns {name: [N,...]} of control steps beside what was seen and executed; ``start``: when the first was
    measured.
    """
    named = {_LABEL + name: values for name, values in _labels(records).items()}
    captured = np.array([record.captured - start for record in records])
    return {"intervention": np.array([one.intervened for one in records]), **named, f"{_LABEL}captured": captured}


def _labels(records: Sequence[Record]) -> dict[str, np.ndarray]:
    requested = np.stack([record.requested for record in records])
    executed = np.stack([record.executed for record in records])
    asked = np.isfinite(requested).all(axis=1)
    numbers = ("policy_version", "chunk", "step_in_chunk")
    return {
        "requested": np.where(asked[:, None], requested, executed).astype(np.float32),
        "asked": asked,
        "clipped": np.stack([record.clipped for record in records]),
        "source": np.array([SOURCES.index(record.source) for record in records]),
        "reason": np.array([REASONS.index(one.reason) if one.reason in REASONS else -1 for one in records]),
        "latency": np.array([record.latency for record in records], np.float32),
        **{name: np.array([getattr(record, name) for record in records], np.int64) for name in numbers},
    }


class Recorder:
    """Writes episodes in a thread of low priority, one after the other, while the next one is played.

    A context manager; at its end all episodes are on the disk and the dataset is finished.
    """

    def __init__(self, folder: Path) -> None:
        self.episodes = 0  # that were given
        self._recording = Recording(folder)
        self._thread = ThreadPoolExecutor(1, "recorder", initializer=step_back)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Recorder:
        self._recording.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._recording.__exit__(None, None, None)  # what was recorded is whole, also after an error

    def add(self, episode: Demonstrations) -> None:
        """Write ``episode`` from now on; raises UserError when the one before could not be written."""
        self._wait()
        self._writing = self._thread.submit(self._recording.add, episode)
        self.episodes += 1

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


def step_back() -> None:
    """Let control and policy go before the thread that calls this."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
