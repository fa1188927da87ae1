"""How a policy is trained by RL: what surrounds a run, the base class of trainers, on-policy and off-policy ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from vla_rl.algorithms.off_policy import OffPolicyConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import Reducer, ReplayBuffer
from vla_rl.contract.config import DEEPEST, WIDEST, Checked, at_least, check_choice, check_limits, within
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Policy, require
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.mixture import Mixture, Strata
from vla_rl.experience.relabel import relabelled
from vla_rl.experience.replay import InMemory, Interventions, OnDisk, Replay
from vla_rl.experience.rollout import WindowConfig
from vla_rl.experience.sources import CollectingSource
from vla_rl.fleet.sampler import AdaptiveSampler, SamplerConfig
from vla_rl.policies.critics import QEnsemble, RunningCritic, ValueCritic
from vla_rl.policies.feed_forward import ActorConfig
from vla_rl.policies.flow import FlowSampler
from vla_rl.policies.image_encoder import Activation, ImageEncoder, make_orthogonal
from vla_rl.policies.normalization import RunningStatistics
from vla_rl.recipes.env_config import EnvFactory
from vla_rl.recipes.terminal import bar
from vla_rl.rewards.env import RewardWeights, rewarded
from vla_rl.rewards.reward_model import Reward, load_reward
from vla_rl.training.checkpoint import process_folder
from vla_rl.training.loop import AlgorithmConfig, LoopConfig, LoopLearner
from vla_rl.training.sharding import ShardedGroup

CPU = torch.device("cpu")
_NO_FLOW = "so it is no flow policy; train it with OnPolicyRL(StartFrom()), or give the trainer a policy built on it."
T = TypeVar("T")


def generator(seed: int, stream: int) -> torch.Generator:
    """An independent generator per seed and purpose, so that a change in one stage leaves the others alone."""
    return torch.Generator().manual_seed(1_000_003 * stream + seed)


class Trainable(Policy, Protocol):
    """A policy that learns and can be saved, and on which heads can be built (``vla_rl/policies/heads.py``)."""

    spec: EnvSpec

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The entries of ``encode`` that a critic reads, with their flattened sizes; critics add ``time``."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that an algorithm may change, by name."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that names the class, see ``vla_rl/pretrained.py``."""


def placed(policy: T, device: torch.device) -> T:
    """``policy`` with its weights on ``device``; what is no network has none."""
    if isinstance(policy, nn.Module):
        policy.to(device)
    return policy


@dataclass(frozen=True)
class LearnedReward:
    """What is paid while learning: what the reward model in ``folder`` sees, or the environment's own reward.

    The environment's own success still ends episodes and still evaluates the policy, so an exploited reward shows: the
    return rises and validation does not.  Demonstrations in a replay buffer keep the rewards that they were recorded
    with; mix them in only if those are of the same kind.
    """

    folder: str = ""  # a checkpoint folder, such as runs/progress/checkpoints/progress; "": the environment's own
    weights: RewardWeights = RewardWeights()

    def wrap_env(self, env: VecEnv) -> VecEnv:
        """``env`` with this reward; raises UserError for a folder without a reward model."""
        if not self.folder:
            return env
        model: Reward = load_reward(self.folder)
        return rewarded(env, model, self.weights)


@dataclass(frozen=True)
class RunContext:
    """The surroundings of one training run.

    env             makes the environments, simulated or imagined
    base            the policy that the run starts from; None when the config builds one from nothing
    group           the processes that share the work
    demonstrations  folder of a dataset; "" for none
    device          where policy, critic, learner and replay are
    reward          what the environments pay while learning
    collector       number of the process that collects, of the ``collectors`` that each learning process has
    """

    env: EnvFactory
    base: Trainable | None
    seed: int
    group: Reducer
    demonstrations: str = ""
    device: torch.device = CPU
    reward: LearnedReward = LearnedReward()
    collector: int = 0
    collectors: int = 1

    @property
    def part(self) -> int:
        """The number of this share of the environments, seeds and exploration among ``parts``."""
        return self.group.rank * self.collectors + self.collector

    @property
    def parts(self) -> int:
        """How many processes collect, in all."""
        return self.group.size * self.collectors

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the weights only."""
        return isinstance(self.group, ShardedGroup)

    def split(self, collectors: int) -> list[RunContext]:
        """A context for each of this process's ``collectors``."""
        return [replace(self, collector=i, collectors=collectors) for i in range(collectors)]

    def make_training(self, num_envs: int) -> VecEnv:
        return self.reward.wrap_env(self.env.make_training(num_envs))

    def start(self, needed_by: str) -> Trainable:
        """``base``; raises UserError when there is none or when it lacks what heads and critics read."""
        if self.base is None:
            raise UserError(
                f"{needed_by} is built on another policy and none was given, so it cannot be built; add --policy with "
                "a checkpoint folder or module:Class."
            )
        lacking = [name for name in ("spec", "feature_sizes", "encode") if not hasattr(self.base, name)]
        if lacking:
            raise UserError(
                f"{type(self.base).__name__} has no {lacking[0]}, so {needed_by} cannot be built on it; see "
                "vla_rl.policies.heads.ObservationEncoder."
            )
        return self.base

    def start_flow(self, needed_by: str, sampler: FlowSampler, final_noise: float) -> Trainable:
        """``base`` itself, exploring by ``sampler``, whose noise falls to ``final_noise`` times itself in the run.

        Raises UserError unless it is a flow policy.
        """
        base: Any = self.start(needed_by)
        require(base, needed_by, ("with_sampler",), _NO_FLOW)
        return base.with_sampler(sampler, final_noise)

    def episodes(self, needed_by: str) -> Demonstrations:
        """The demonstrations; raises UserError when there are none."""
        if not self.demonstrations:
            raise UserError(
                f"{needed_by} needs demonstrations and none were given, so it cannot learn; add --demonstrations "
                "FOLDER."
            )
        return load_demonstrations(self.demonstrations)

    def seeds(self) -> SeedStream:
        """The training seeds of this share: every ``parts``-th, from number ``part``."""
        seeds = seed_ranges.training_seeds(self.seed, "reinforcement")
        return SeedStream(seeds.start + self.part, seeds.stop, self.parts)

    def exploration(self) -> torch.Generator:
        return generator(self.seed, 5 + 100 * self.part)


class SourceConfig(Protocol):
    """The frozen dataclass of one kind of experience, which builds its source."""

    @property
    def num_envs(self) -> int:
        """The number of environments."""

    def split(self, parts: int) -> SourceConfig:
        """What each of ``parts`` processes collects."""

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> CollectingSource:
        """The source with these numbers."""


class PolicyConfig(Protocol):
    """The frozen dataclass of a policy to train: a new one, or one on top of ``context.base``."""

    def build(self, context: RunContext) -> Trainable:
        """The policy to train."""


class TrainerConfig:
    """One way to train a policy: the base class of frozen dataclasses, with what on-policy training does as default.

    Environment, policy, source and learner are each built from the config alone, so that a worker that has its JSON
    can build the parts that it needs.  They are built in this order: environment, policy, learner, source.
    """

    policy: Any  # a ``PolicyConfig``, of those whose policy is built by one
    experience: SourceConfig
    loop: LoopConfig  # how long to train, and how often to validate and save
    algorithm: Any  # the frozen dataclass of its numbers, which builds the learner
    joins_episodes = False  # over the rollouts of a source, which therefore must not be mixed with those of others

    def build_env(self, context: RunContext) -> VecEnv:
        """The environments of this process to learn in."""
        return context.make_training(self.experience.split(context.parts).num_envs)

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """The policy to train in ``env``; it may be ``context.base``, changed in place, or stand on top of it.

        Here the one that ``policy`` builds.
        """
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        return placed(self.policy.build(context), context.device)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """What improves ``policy``: here with a critic of values."""
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        # A policy whose features hold pixels gives its critic an encoder for them.
        vision = policy.new_vision() if hasattr(policy, "new_vision") else None
        critic = ValueCritic({**policy.feature_sizes, "time": 1}, vision=vision).to(context.device)
        noise = generator(context.seed, 4)
        return self.algorithm.build(policy, policy.trainable(), critic, noise, context.group)

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        """The experience of this process, or of one of its collectors."""
        part = self.experience.split(context.parts)
        return part.build(env, policy, context.seeds(), context.exploration())

    def pretrain(self, learner: LoopLearner) -> bool:
        """Learn from recorded data alone, before the first iteration of a run; returns whether anything was learnt.

        What was learnt is saved when this returns; a run that is killed before that begins anew.
        """
        return False

    def score(self, outcomes: Outcomes) -> Rate | MeanReturn:
        """By what the best weights are chosen."""
        return outcomes.score


@dataclass(frozen=True)
class RLConfig(TrainerConfig, Checked):
    """On-policy RL of a flow policy itself: its sampler, its experience, the algorithm and the loop."""

    sampler: FlowSampler
    experience: SourceConfig = field(default_factory=WindowConfig)
    final_noise: float = at_least(0.4, 0)  # the sampler's noise falls linearly to this share of itself
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)

    def noise(self) -> str:
        """The exploration in words, for reports."""
        sampler = self.sampler
        return (
            f"{sampler.schedule}, {sampler.placement}, K={sampler.steps}, noise falling to {self.final_noise:.0%} of it"
        )

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy."""
        return context.start_flow("RL of a flow policy", self.sampler, self.final_noise)


@dataclass(frozen=True)
class OnPolicyRL(TrainerConfig):
    """On-policy RL of the policy that ``policy`` builds."""

    policy: PolicyConfig
    experience: SourceConfig = field(default_factory=WindowConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)


@dataclass(frozen=True)
class CriticConfig(Checked):
    """Sizes of the value network."""

    width: int = within(64, 1, WIDEST)
    depth: int = within(2, 1, DEEPEST)
    activation: Activation = "tanh"  # or "elu", of the hidden layers

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "activation", "tanh", "elu")


@dataclass(frozen=True)
class StateBased(TrainerConfig):
    """A policy from nothing by PPO; its best weights are those of the highest validation return.

    Policy and critic read proprioception and the pixels of ``policy.cameras``; they standardise proprioception by the
    statistics of all training data so far.  The critic also reads the ``privileged/*`` entries that
    ``experience.privileged`` names; the policy never does.  Hidden layers begin orthogonal.
    """

    policy: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    experience: WindowConfig = field(default_factory=WindowConfig)
    # Returns have no scale of their own.
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(collapse=math.inf))

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """A new one; raises UserError for a given one and for privileged entries that ``env`` does not deliver."""
        if context.base is not None:
            raise UserError(
                f"StateBased makes a policy from nothing, so the given {type(context.base).__name__} would learn "
                "nothing; leave --policy out, or choose a config that improves one (demo.py:last_step)."
            )
        if unknown := sorted(set(self.experience.privileged) - set(env.spec.extras)):
            raise UserError(
                f"{env.spec.name!r} delivers no {unknown[0]!r} (--rl.experience.privileged), so the critic cannot read "
                f"it; {did_you_mean(unknown[0], env.spec.extras)}"
            )
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        policy = self.policy.build(env.spec, RunningStatistics(env.spec.state.shape[0]))
        make_orthogonal(list(policy.network)[:-1])
        return placed(policy, context.device)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """PPO, whose critic is drawn from the numbers that follow those of the policy."""
        sizes = {"state": env.spec.state.shape[0], **policy.feature_sizes}
        sizes |= {name: math.prod(env.spec.extras[name].shape) for name in self.experience.privileged}
        vision = ImageEncoder.of(env.spec, self.policy.cameras) if self.policy.cameras else None
        critic = RunningCritic(sizes, self.critic.width, self.critic.depth, vision, self.critic.activation)
        make_orthogonal(critic.body)
        noise = generator(context.seed, 4)
        ours: Any = policy  # whose samples have a density
        return self.algorithm.build(ours, policy.trainable(), critic.to(context.device), noise, context.group)

    def score(self, outcomes: Outcomes) -> MeanReturn:
        """The mean return, also where the environment knows success."""
        return MeanReturn.of(outcomes.returns)


# -- off-policy --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayConfig(Checked):
    """The replay buffer, and the demonstrations and corrections that its batches are mixed with.

    What a person corrected is drawn among the run's own decisions as well, as in HIL-SERL (arXiv 2410.21845).
    """

    capacity: int = at_least(200_000, 1)  # slots: decisions and ends of episodes; processes that share a run share them
    gamma: float = within(0.99, 0, 1)  # per low-level action
    n_step: int = at_least(3, 1)  # decisions
    share: float = within(0.25, 0, 1)  # of the demonstrations in a batch
    corrections: float = 0.0  # share of the decisions in which a person acted
    folder: str = ""  # keep the replay in files there instead of in memory

    def __post_init__(self) -> None:
        """Raises UserError for numbers that have no meaning."""
        super().__post_init__()
        check_limits(self, corrections=(0, 1 - self.share))

    def build(self, policy: Policy, context: RunContext, spec: EnvSpec, horizon: int) -> ReplayBuffer:
        """The buffer, with the demonstrations relabelled as decisions of ``policy`` in chunks of ``horizon``.

        Raises ContractError for demonstrations that do not fit ``spec``.
        """
        device, group = context.device, context.group
        storage = OnDisk(process_folder(Path(self.folder), group.rank), device) if self.folder else InMemory(device)
        online = Replay(-(-self.capacity // group.size), self.gamma, self.n_step, storage)
        if not self.share:
            return self.joined(online, {}, policy)
        episodes = context.episodes(f"a replay with a share of {self.share:g} for demonstrations").for_env(spec)
        noise = generator(context.seed, 6)  # every process relabels all of them alike
        offline = Replay(2 * horizon * len(episodes.state) + 2, self.gamma, self.n_step, InMemory(device))
        with bar("relabel", episodes.count * horizon) as update:
            for done, rollout in enumerate(relabelled(episodes, policy, spec, horizon, noise, horizon), 1):
                offline.add(rollout)
                update(done, "demonstrations")
        return self.joined(online, {"demonstrations": offline}, policy)

    def joined(self, online: Replay, recorded: Mapping[str, Replay], policy: Policy) -> ReplayBuffer:
        """Batches of what the run collects and what was ``recorded`` (demonstrations, or nothing)."""
        parts: dict[str, ReplayBuffer] = {"online": online, **recorded}
        shares = {"online": 1.0 - self.share - self.corrections, **dict.fromkeys(recorded, self.share)}
        if self.corrections:
            parts["corrections"], shares["corrections"] = Interventions(online), self.corrections
        return Mixture(parts, shares) if len(parts) > 1 else online


@dataclass(frozen=True)
class AdaptiveReplay(ReplayConfig):
    """Tasks are equally likely, and the kinds of data of a task are drawn by SOP's formula, in place of shares.

    See ``vla_rl/fleet/sampler.py``, which learns from the losses of the critics what is drawn.
    """

    max_age: int = at_least(1000, 0)  # updates after which autonomous decisions are no longer drawn
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def joined(self, online: Replay, recorded: Mapping[str, Replay], policy: Policy) -> ReplayBuffer:
        """The strata of the run's decisions, of the corrections in them, and of the demonstrations."""
        offline = recorded.get("demonstrations", Replay(2, self.gamma, self.n_step))
        return Strata(online, offline, AdaptiveSampler(self.sampler), lambda: policy.version, self.max_age)


@dataclass(frozen=True)
class OffPolicyRL(TrainerConfig):
    """Off-policy RL of the policy that ``policy`` builds; each of several processes has a share of the replay."""

    policy: PolicyConfig
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=8))
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: OffPolicyConfig = field(default_factory=ResidualTD3Config)

    joins_episodes = True  # in the replay buffer

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """Raises UserError where processes share the weights: batches are drawn by each, whenever it likes."""
        if context.sharded:
            raise UserError(
                f"{type(self.algorithm).__name__} has target networks, which cannot be cut into shards, so nothing was "
                "started; leave sharded out, or choose an on-policy algorithm."
            )
        return super().build_policy(context, env)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        horizon = getattr(policy, "horizon", 1)
        replay = self.replay.build(policy, context, env.spec, horizon)
        # Critics of latent noise evaluate the noise that is chosen, which may be larger than a chunk.
        actions = getattr(policy, "latent", horizon * env.spec.action_dim)
        sizes = {**policy.feature_sizes, "time": 1}
        critic = QEnsemble(sizes, actions, self.algorithm.num_critics, self.algorithm.critic).to(context.device)
        draws = generator(context.seed, 4 + 100 * context.group.rank)  # of each process's own
        ours: Any = policy  # whose decisions are differentiable, which the learner checks
        return self.algorithm.build(ours, policy.trainable(), critic, replay, draws, context.group)

    def pretrain(self, learner: LoopLearner) -> bool:
        """Learn from the recorded data before anything is collected."""
        if steps := self.algorithm.offline_steps:
            recorded: Any = learner  # its algorithm's, which can begin with recorded data
            with bar("offline", steps) as update:
                recorded.pretrain(steps, lambda step, info: update(step + 1, f"value {info['critic/value']:.3f}"))
        return steps > 0
