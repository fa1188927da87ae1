"""What can be done with an imitation policy to make it better: the objects that ``Improve`` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import ExperienceSource, Reducer, ReplayBuffer
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import suite
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.relabel import relabelled
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import SeedStream, WindowConfig
from vla_rl.experience.storage import InMemory, OnDisk
from vla_rl.policies.critics import QEnsemble, ValueCritic
from vla_rl.policies.flow import FlowSampler
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvFactory
from vla_rl.recipes.progress import bar
from vla_rl.training.distributed import SummedCounters
from vla_rl.training.loop import AlgorithmConfig, LoopConfig, LoopLearner


def generator(seed: int, stream: int) -> torch.Generator:
    """An independent generator per seed and purpose, so that a change in one stage leaves the others alone."""
    return torch.Generator().manual_seed(1_000_003 * stream + seed)


class Trainable(Policy, Protocol):
    """A policy that learns and can be saved."""

    @property
    def feature_sizes(self) -> dict[str, int]:
        """What it stores for acting on, by size."""

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def save_pretrained(self, folder: str | Path) -> None: ...


class SourceConfig(Protocol):
    """The frozen dataclass of one kind of experience, which knows its source."""

    @property
    def num_envs(self) -> int:
        """How many environments it plays in."""

    def split(self, parts: int) -> SourceConfig:
        """What each of ``parts`` processes collects."""

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> ExperienceSource:
        """The source with these numbers."""


@dataclass(frozen=True)
class RunContext:
    """Where a method works: the world, its imitation policy and demonstrations, the seed, and who shares the work."""

    env: EnvFactory
    base: TinyVLA
    seed: int
    group: Reducer
    demonstrations: str = ""  # folder of a dataset; none

    def episodes(self, who: str) -> Demonstrations:
        """The demonstrations; raises UserError when there are none for ``who``, which needs them."""
        if not self.demonstrations:
            raise UserError(
                f"{who} needs demonstrations and none were given, so it cannot learn; add --demonstrations FOLDER."
            )
        return load_demonstrations(Path(self.demonstrations))


@dataclass
class TrainingSetup:
    """What a method made for the loop.

    ``begin()`` is called once before it, unless the run is resumed; ``prepare(progress)`` before every iteration, and
    says whether the world has changed.
    """

    policy: Trainable
    env: VecEnv
    source: ExperienceSource
    learner: LoopLearner
    prepare: Callable[[float], bool] = lambda progress: False
    begin: Callable[[], None] = lambda: None


class TrainerConfig(Protocol):
    """The frozen dataclass of one way to improve a policy."""

    @property
    def loop(self) -> LoopConfig: ...

    def assemble(self, context: RunContext) -> TrainingSetup:
        """Policy, source and learner; ``context.base`` may be changed in place or stay frozen."""


class PolicyConfig(Protocol):
    """The frozen dataclass of what is trained, given an imitation policy."""

    def build(self, context: RunContext) -> Trainable:
        """The policy to train."""


@dataclass(frozen=True)
class RLConfig:
    """On-policy RL of the flow itself: how it is sampled, how experience is cut, the algorithm and its loop."""

    sampler: FlowSampler
    experience: SourceConfig = field(default_factory=WindowConfig)
    final_noise: float = 0.4  # the sampler's noise falls linearly to this share of itself
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)

    def noise(self) -> str:
        """The exploration in words."""
        sampler = self.sampler
        return (
            f"{sampler.schedule}, {sampler.placement}, K={sampler.steps}, noise falling to {self.final_noise:.0%} of it"
        )

    def assemble(self, context: RunContext) -> TrainingSetup:
        policy = context.base.with_sampler(self.sampler)
        made = on_policy(context, policy, self.experience, self.algorithm)
        made.prepare = lambda progress: self._quieten(policy, progress)
        return made

    def _quieten(self, policy: TinyVLA, progress: float) -> bool:
        """Explore less as the run goes on: what is deployed has no noise at all."""
        policy.with_sampler(self.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress))
        return False


@dataclass(frozen=True)
class OnPolicyRL:
    """On-policy RL of another policy that is built on the imitation policy, which stays frozen."""

    subject: PolicyConfig
    experience: SourceConfig = field(default_factory=WindowConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)

    def assemble(self, context: RunContext) -> TrainingSetup:
        torch.manual_seed(context.seed)
        return on_policy(context, self.subject.build(context), self.experience, self.algorithm)


def on_policy(
    context: RunContext, policy: Trainable, experience: SourceConfig, algorithm: AlgorithmConfig
) -> TrainingSetup:
    """Environment, source, critic and learner for ``policy``."""
    group, seed = context.group, context.seed
    part = experience.split(group.size)
    env = context.env.make_training(part.num_envs)
    torch.manual_seed(seed)
    critic = ValueCritic({**policy.feature_sizes, "time": 1})
    learner = algorithm.build(policy, policy.trainable(), critic, generator(seed, 4), group)  # type: ignore[arg-type]
    source = part.build(env, policy, _stream(context), generator(seed, 5 + 100 * group.rank))
    return TrainingSetup(policy, env, source if group.size == 1 else SummedCounters(source, group), learner)


def _stream(context: RunContext) -> SeedStream:
    seeds = suite.training_seeds(context.seed, "reinforcement")
    return SeedStream(seeds.start + context.group.rank, seeds.stop, context.group.size)


@dataclass(frozen=True)
class ReplayConfig:
    """The replay, and the demonstrations that it is mixed with."""

    capacity: int = 200_000  # slots: decisions and ends of episodes
    gamma: float = 0.99  # per low-level action
    n_step: int = 3  # decisions
    share: float = 0.25  # of the demonstrations in a batch
    folder: str = ""  # keep the replay in files there instead of in memory

    def build(self, policy: Policy, context: RunContext, horizon: int) -> ReplayBuffer:
        """The memory, demonstrations included, relabelled as experience of ``policy``."""
        online = Replay(self.capacity, self.gamma, self.n_step, OnDisk(self.folder) if self.folder else InMemory())
        if not self.share:
            return online
        episodes, made = (
            context.episodes(f"a memory with a share of {self.share:g} for them"),
            generator(context.seed, 6),
        )
        offline = Replay(2 * horizon * len(episodes.state) + 2, self.gamma, self.n_step)
        env = context.env.make(1)
        with bar("relabel", episodes.count * horizon) as update:
            for done, rollout in enumerate(relabelled(episodes, policy, env.spec, horizon, made, horizon), 1):
                offline.add(rollout)
                update(done, "demonstrations")
        env.close()
        parts: Mapping[str, ReplayBuffer] = {"online": online, "demonstrations": offline}
        return Mixture(parts, {"online": 1.0 - self.share, "demonstrations": self.share})


class OffPolicyLearner(LoopLearner, Protocol):
    """A learner that can begin with recorded data."""

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None]) -> None:
        """Take ``steps`` steps from the memory; ``report(step, metrics)`` after each."""


class OffPolicyAlgorithm(Protocol):
    """The frozen dataclass of one off-policy algorithm's numbers, which knows its learner."""

    @property
    def num_critics(self) -> int: ...

    @property
    def critic(self) -> HeadConfig: ...

    @property
    def offline_steps(self) -> int:
        """Steps from recorded data alone, before anything is collected."""

    def build(
        self,
        policy: Any,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        generator: torch.Generator,
    ) -> OffPolicyLearner:
        """A learner that improves ``policy`` (through ``parameters``) and ``critic`` in place from ``replay``."""


@dataclass(frozen=True)
class OffPolicyRL:
    """Off-policy RL of a policy that is built on the imitation policy, which stays frozen."""

    subject: PolicyConfig
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=8))
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: OffPolicyAlgorithm = field(default_factory=ResidualTD3Config)

    def assemble(self, context: RunContext) -> TrainingSetup:
        seed = context.seed
        torch.manual_seed(seed)
        policy = self.subject.build(context)
        env = context.env.make_training(self.experience.num_envs)
        horizon = getattr(policy, "horizon", 1)
        replay = self.replay.build(policy, context, horizon)
        seen, actions = {**policy.feature_sizes, "time": 1}, horizon * env.spec.action_dim
        critic = QEnsemble(seen, actions, self.algorithm.num_critics, self.algorithm.critic)
        learner = self.algorithm.build(policy, policy.trainable(), critic, replay, generator(seed, 4))
        source = self.experience.build(env, policy, _stream(context), generator(seed, 5))
        return TrainingSetup(policy, env, source, learner, begin=lambda: self._pretrain(learner))

    def _pretrain(self, learner: OffPolicyLearner) -> None:
        """Learn from what is recorded before anything is collected."""
        if steps := self.algorithm.offline_steps:
            with bar("offline", steps) as update:
                learner.pretrain(steps, lambda step, info: update(step + 1, f"value {info['value']:.3f}"))
