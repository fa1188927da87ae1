"""The learners of a fleet, as configs build them from a policy, its demonstrations and the ledger's records."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import DEMONSTRATED, Chunks, FamiliesEqually, HGDagger, HGDaggerConfig, ImitationPolicy
from vla_rl.algorithms.decisions import ages
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, mean
from vla_rl.algorithms.recap import Recap, RecapConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import OneProcess, Resumable, Rollout
from vla_rl.contract.config import Checked, above_zero, at_least, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, Mode, Policy
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.mixture import choose, key_of
from vla_rl.experience.relabel import DONE, INTERVENTION, as_decisions, relabelled
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import side_by_side
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.fleet.releases import CanaryRule
from vla_rl.fleet.sampler import CORRECTIONS, OFFLINE, ONLINE, STRATA, AdaptiveSampler, SamplerConfig
from vla_rl.policies.advantage_conditioned import advantage_conditioned
from vla_rl.policies.critics import DistributionalValue, QEnsemble
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.recipes.config_files import keep_file, read_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.export import demonstrations_of
from vla_rl.recipes.imitate import demonstrated_chunks, encode_episodes
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import AdaptiveReplay, PolicyConfig, ReplayConfig, RunContext, Trainable, generator
from vla_rl.training.tracking import RunFolder

_STREAM = 4  # of the learner's generator
_RELABEL = 6  # of the generator of the base's noise in demonstrations
_NEVER = 1e-15  # gradient steps per decision: the fleet says when one is taken
_TERMINAL = ("success", "failure")  # what a person says of the task; every other outcome ends an episode from outside
LEARNER = "learner"  # its run, in a fleet's folder


@dataclass(frozen=True)
class Learn(Checked):
    """What ``vla-rl serve FOLDER --learn FILE.py:function`` runs beside the server.

    Every update is a gradient step.  A version that was learnt is first tried by the share of robots that ``canary``
    says, and promoted when its success does not lie below that of the version in use.

    updates_per_second  at most; the same as of ``vla-rl fleet simulate``, which foretells what it does
    turn                updates between two looks at what robots have sent (SOP: 25)
    publish_every       updates between two versions
    rest_after          seconds without a new episode after which it waits for the next one
    patience            seconds for a trial; one that takes longer gives way to a newer version
    """

    method: FleetMethod
    policy: str  # the checkpoint that the fleet begins with
    demonstrations: str  # the dataset that it has imitated
    updates_per_second: float = above_zero(8.0)
    turn: int = at_least(25, 1)
    publish_every: int = at_least(200, 1)
    rest_after: float = above_zero(60.0)
    patience: float = above_zero(600.0)
    canary: CanaryRule = field(default_factory=CanaryRule)
    seed: int = 1
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl


def prepare(config: Learn, fleet: Path, source: Path | None) -> Path | None:
    """Have the run of ``config`` in the folder ``fleet``; returns where an earlier one of another config is now.

    One of the same config goes on.
    """
    path = fleet / LEARNER
    if (path / "config.json").exists() and to_json(read_config(path)) == to_json(config):
        return None
    with closing(RunFolder(path, config)) as run:
        if source is not None:
            keep_file(source, path)
        return run.moved_to


def command(fleet: Path, key: Path) -> tuple[str, ...]:
    """The program of the learner that was prepared, which signs with the key in the file ``key``."""
    return sys.executable, "-m", "vla_rl.recipes.fleet.learning", str(fleet), str(key)


class FleetLearner(Resumable, Protocol):
    """A learner that says separately what it has to learn from, and how often it learns."""

    @property
    def policy(self) -> Policy:
        """What it changes."""

    def add(self, rollout: Rollout) -> int:
        """Keep ``rollout``; returns how many of its decisions."""

    def learn(self, steps: int) -> dict[str, float]:
        """So many gradient steps; returns metrics, none when there is nothing to learn from."""


class FleetMethod:
    """The base of the frozen dataclasses of ways to learn from a fleet.

    By itself robots act as deployed, and every control step that they send begins a chunk.
    """

    @property
    def mode(self) -> Mode:
        """How robots act in virtual time: "eval" as they would be deployed, "sample" with exploration."""
        return "eval"

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> FleetLearner:
        """The learner of ``base``, which it changes, with the ``episodes`` that ``base`` has imitated."""
        raise NotImplementedError

    def rollout(self, policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
        """What a robot sent, for the learner's ``add``; ``policy`` is the learner's.

        ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.
        Raises ContractError for an episode of a task that the policy does not have.
        """
        steps = demonstrations_of(episode).with_tasks(policy.spec.tasks)
        extras = {DONE: steps.extras[DONE], INTERVENTION: np.array(episode.intervened)}
        columns = _chunks(policy, replace(steps, extras=extras, robot=episode.sender.robot))
        return _played(columns, episode, known, policy.horizon)


@dataclass(frozen=True)
class LearnByCorrections(FleetMethod):
    """HG-DAgger: what a person did is imitated, beside the demonstrations; families of tasks are equally likely."""

    algorithm: HGDaggerConfig = field(default_factory=HGDaggerConfig)

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> HGDagger:
        """Raises UserError for a policy without a loss for every action."""
        flow = cast(ImitationPolicy, base)
        recorded = demonstrated_chunks(flow, episodes, encode_episodes(base, episodes), flow.horizon)
        spec = flow.spec
        equally = FamiliesEqually([spec.family(task) for task in range(len(spec.tasks))])
        return HGDagger(base, base.trainable(), recorded, self.algorithm, generator(seed, _STREAM), equally)


@dataclass(frozen=True)
class LearnByAdvantage(FleetMethod):
    """RECAP: imitate everything, conditioned on how good it was, and act as if the next decision were good."""

    algorithm: RecapConfig = field(default_factory=RecapConfig)
    balance: SamplerConfig = field(default_factory=SamplerConfig)  # of tasks and kinds of data, in the policy's batches
    guidance: float = 1.0  # see AdvantageConfig

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> Recap:
        """Raises UserError for a policy that cannot be conditioned on how good a decision was."""
        policy = advantage_conditioned(base, self.guidance)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            value = DistributionalValue({**base.feature_sizes, "time": 1})
        rng = generator(seed, _STREAM)
        sampler = BalancedChunks(AdaptiveSampler(self.balance), family_numbers(base.spec))
        learner = Recap(policy, policy.trainable(), value, base.spec.time_limit, self.algorithm, rng, sampler)
        learner.add(recorded_rollout(policy, episodes))
        return learner


@dataclass
class BalancedChunks:
    """A ``ChunkSampler`` by ``sampler``: what robots did alone, what a person corrected, what was recorded.

    Its tasks are the ``families`` int [M] of the instructions, or else those of which there are many instructions would
    have most of every batch.
    """

    sampler: AdaptiveSampler
    families: Tensor

    def __post_init__(self) -> None:
        self._drawn = np.zeros((0, 2), np.int64)
        self.state_dict, self.load_state_dict = self.sampler.state_dict, self.sampler.load_state_dict

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Positions, those of a task and kind one after the other; demonstrations are nobody's correction."""
        recorded = chunks.version == DEMONSTRATED
        kind = torch.where(recorded, OFFLINE, torch.where(human, CORRECTIONS, ONLINE))
        keys = key_of(torch.stack([self.families.to(kind.device)[chunks.task], kind], 1).cpu().numpy())
        tasks = int(keys.max()) // len(STRATA) + 1
        counts = np.bincount(keys, minlength=len(STRATA) * tasks).reshape(tasks, len(STRATA))
        seed = int(torch.randint(2**62, (1,), generator=generator))
        self._drawn = self.sampler.draw(counts, size, np.random.default_rng(seed))
        slots = torch.arange(len(chunks), device=chunks.task.device)
        return choose(slots, keys, key_of(self._drawn), generator)

    def record(self, losses: Tensor) -> None:
        """They decide what is drawn from now on."""
        self.sampler.record(self._drawn, losses.cpu().double().numpy())


def recorded_rollout(policy: FlowPolicy, episodes: Demonstrations) -> Rollout:
    """The successful ``episodes`` as columns: each ``H`` times, with chunks that begin at its step 0, 1, ... ``H - 1``.

    So every control step begins a decision, as in imitation, and the decisions of a column follow each other.  Their
    version is ``DEMONSTRATED``.
    """
    ends = np.zeros(len(episodes.state), bool)
    ends[[end - 1 for _, end in episodes.spans()]] = True
    return side_by_side(list(_chunks(policy, replace(episodes, extras={DONE: ends}, robot="demonstrations"))))


def _chunks(policy: FlowPolicy, episodes: Demonstrations) -> Iterator[Rollout]:
    """The columns of :func:`recorded_rollout`; each observation is encoded once, whatever columns it is in."""
    features = encode_episodes(policy, episodes)

    def encoded(steps: list[int]) -> list[Features]:
        return [{name: item[step : step + 1] for name, item in features.items()} for step in steps]

    return as_decisions(episodes, encoded, policy.horizon, policy.horizon)


def _played(columns: Iterable[Rollout], episode: FleetEpisode, known: Collection[int], horizon: int) -> Rollout:
    """``columns`` of one ``episode``, the first begun at its step 0, with what a recording by a script does not have:
    whether it failed, and by which version the robot acted in each step; 0 for one that is not ``known``.
    """
    version = torch.tensor([one if one in known else 0 for one in episode.versions])
    labelled = []
    for first, column in enumerate(columns):
        ran, success = version[first::horizon][: len(column.reward), None], column.success & episode.end.success
        labelled.append(replace(column, version=ran, success=success))
    return side_by_side(labelled)


@dataclass(frozen=True)
class LearnByReplay(FleetMethod):
    """Residual TD3, RLPD or any other off-policy algorithm, on whole episodes of robots and on the demonstrations.

    The fleet decides when a gradient step happens, so the algorithm's ``utd_ratio`` has no effect; its other schedule
    holds: no step before ``learning_starts`` decisions of robots, the critics alone first, the actor in every
    ``policy_delay``-th step.  The replay's ``max_age`` counts publications, and its tasks are families of tasks.
    """

    policy: PolicyConfig = field(default_factory=TD3Residual)
    algorithm: OffPolicyConfig = field(default_factory=ResidualTD3Config)
    replay: ReplayConfig = field(default_factory=lambda: AdaptiveReplay(max_age=20))
    explore: bool = True  # simulated robots act with the policy's exploration noise

    @property
    def mode(self) -> Mode:
        """How robots act in virtual time."""
        return "sample" if self.explore else "eval"

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> ReplayLearner:
        """Raises UserError for an algorithm that learns offline first, and for a policy of latent noise."""
        numbers = replace(self.algorithm, utd_ratio=_NEVER)
        if numbers.offline_steps:
            raise UserError(
                f"{type(numbers).__name__} takes {numbers.offline_steps} steps before the first decision but a fleet's "
                "robots decide from the beginning; set offline_steps to 0, or choose ResidualTD3Config or RLPDConfig."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # module initialisation has no generator argument
            policy: Any = self.policy.build(RunContext(EnvConfig(""), base, seed, OneProcess()))
            horizon, dims = getattr(policy, "horizon", 1), policy.spec.action_dim
            if hasattr(policy, "latent"):
                raise UserError(
                    f"{type(policy).__name__} chooses noise and a robot sends actions, so its episodes could not be "
                    "learnt from; choose a policy of actions, such as TD3Residual."
                )
            sizes = {**policy.feature_sizes, "time": 1}
            critic = QEnsemble(sizes, horizon * dims, numbers.num_critics, numbers.critic)
        families = family_numbers(policy.spec)
        replay = self.replay.joined(*self._parts(policy, episodes, families, seed), policy)
        learner = numbers.build(policy, policy.trainable(), critic, replay, generator(seed, _STREAM))
        return ReplayLearner(learner, families)

    def rollout(self, policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
        """See ``FleetMethod``; relabelled with the base's actions."""
        return relabelled_episode(policy, episode, known)

    def _parts(
        self, policy: Any, episodes: Demonstrations, families: torch.Tensor, seed: int
    ) -> tuple[Replay, dict[str, Replay]]:
        """The buffer of what robots do, and that of the demonstrations."""
        online, config = Replay(self.replay.capacity, self.replay.gamma, self.replay.n_step), self.replay
        if config.folder:
            raise UserError(
                "a fleet's learner saves its replay buffer with its state, so a folder for it would be a second one; "
                "leave replay.folder out."
            )
        if not config.share:
            return online, {}
        horizon, noise = getattr(policy, "horizon", 1), generator(seed, _RELABEL)
        offline = Replay(2 * horizon * len(episodes.state) + 2, config.gamma, config.n_step)
        for rollout in relabelled(episodes, policy, policy.spec, horizon, noise, horizon):
            offline.add(by_family(rollout, families))
        return online, {"demonstrations": offline}


class ReplayLearner:
    """A ``FleetLearner``: an off-policy learner whose ``update`` takes no steps, for somebody else counts them."""

    def __init__(self, learner: OffPolicy, families: torch.Tensor) -> None:
        """``families`` int [M]: the family of each instruction."""
        self.learner, self.policy, self._families = learner, learner.policy, families
        self._said: dict[str, float] = {}  # by the learner of the latest episode
        # All of the learner's (see ``Resumable``), its replay buffer included.
        self.state_dict, self.load_state_dict = learner.state_dict, learner.load_state_dict

    def add(self, rollout: Rollout) -> int:
        """Put whole episodes into the replay buffer; returns how many decisions they have.

        Raises ContractError for a decision of a version that the learner has not reached, and for one of another shape.
        """
        ages(rollout, self.policy.version)
        self._said = self.learner.update(by_family(rollout, self._families))
        return int(rollout.valid.any(-1).sum())

    def learn(self, steps: int) -> dict[str, float]:
        """Take so many gradient steps of the critics; none, and no metrics, before ``learning_starts`` decisions."""
        inner = self.learner
        if inner.decisions < max(1, inner.config.learning_starts):
            return {}
        infos = [inner.step() for _ in range(steps)]
        return {**self._said, "critic/steps": float(inner.steps), **mean(infos)}


def family_numbers(spec: Any) -> torch.Tensor:
    """int [M]: the number of the family of each instruction, in the order of their names."""
    names = [spec.family(task) for task in range(len(spec.tasks))]
    return torch.tensor([sorted(set(names)).index(name) for name in names])


def by_family(rollout: Rollout, families: torch.Tensor) -> Rollout:
    """``rollout`` whose tasks are families: else those of many instructions would have most of every batch."""
    return rollout if rollout.task is None else replace(rollout, task=families[rollout.task])


def relabelled_episode(policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
    """``episode`` as decisions of ``policy``, with reward 1 for a success; a person's steps are marked.

    A policy that decides every control step, such as a residual, gets one column; one with chunks of ``H`` actions as
    many as there are steps at which the first chunk can begin (at most ``H``).  The base of a residual begins a new
    chunk after every step of a person, as on a robot.  Its noise was not recorded: it is drawn anew, from the
    episode's name alone, so that a learner that was killed gets the same decisions again.

    ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.  An
    episode that a person called a success or a failure is terminated, any other truncated at its last observation, and
    the action after that one is left out.  Raises ContractError for a task or an action that the policy does not have.
    """
    horizon = getattr(policy, "horizon", 1)
    person, steps = np.array(episode.intervened), demonstrations_of(episode)
    extras = {**steps.extras, INTERVENTION: person}
    if episode.end.outcome in _TERMINAL:
        del extras["next.success"]  # so that DONE says where it was terminated
    else:
        extras[DONE] = np.zeros(len(person), bool)
    shown = replace(steps, extras=extras, robot=episode.sender.robot)
    noise = [torch.Generator().manual_seed(zlib.crc32("/".join([*episode.sender, episode.name]).encode()))]
    return _played(relabelled(shown, policy, policy.spec, horizon, noise, horizon, person), episode, known, horizon)
