"""How a policy is trained by RL: trainer configs, on-policy training, with a learned reward, beside other runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import ExperienceSource, Reducer
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import Policy
from vla_rl.experience.background import CollectingSource
from vla_rl.experience.board import Board, SharedSource
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import FlowSampler
from vla_rl.policies.heads import HoldsFrozen
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.normalization import Affine
from vla_rl.recipes.context import RunContext, Trainable, generator, placed
from vla_rl.rewards.env import RewardWeights, rewarded
from vla_rl.rewards.reward_model import Reward, load_reward
from vla_rl.training.loop import AlgorithmConfig, LoopConfig, LoopLearner

_ENTRIES = 4096  # of a frozen tensor that are compared


@dataclass(frozen=True)
class SharingConfig:
    """Runs with one ``folder`` read each other's rollouts; they begin from one checkpoint, in one environment."""

    folder: str = ""  # where runs leave their rollouts for each other; "": nothing is shared
    rollouts: int = 1  # of other runs, read at most beside each of one's own
    keep: int = 4  # newest rollouts that a run leaves there; older ones are not read

    def __post_init__(self) -> None:
        """Raises UserError for numbers without a meaning."""
        check_limits(self, rollouts=(0, math.inf), keep=(1, math.inf))

    def require_one_process(self, group: Reducer) -> None:
        """Raise UserError where several processes learn together: each would read the others' as a stranger's."""
        if self.folder and group.size > 1:
            raise UserError(
                f"{group.size} processes learn from one batch already, so they cannot share rollouts as runs of their "
                "own do; start each run in one process, or leave shared.folder empty."
            )

    def around(self, source: ExperienceSource, policy: Policy) -> ExperienceSource:
        """``source`` with the other runs' rollouts beside its own; itself without a folder."""
        if not self.folder:
            return source
        return SharedSource(source, Board(self.folder, common(policy), self.keep), policy, self.rollouts)


def common(policy: Policy) -> str:
    """SHA-256 of what learners must have in common: what makes features, and what samples mean.

    That is the class, the scales and the frozen weights, of which ``_ENTRIES`` of each tensor are compared: others
    differ everywhere.
    """
    digest = hashlib.sha256(type(policy).__qualname__.encode())
    trainable = getattr(policy, "trainable", None)
    learnt = {id(parameter) for parameter in trainable().values()} if callable(trainable) else set()
    for part in _parts(policy):
        for name, module in part.named_modules():
            scales = {key: value for key, value in vars(module).items() if isinstance(value, Affine)}
            digest.update(f"{name} {sorted(scales.items())}\n".encode() if scales else b"")
        for name, parameter in part.named_parameters():
            if id(parameter) not in learnt:
                digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode() + _some(parameter))
    return digest.hexdigest()


def _parts(policy: object) -> Iterator[nn.Module]:
    """``policy`` and the frozen policies in it, as far as they are networks."""
    if isinstance(policy, nn.Module):
        yield policy
    for part in policy._frozen if isinstance(policy, HoldsFrozen) else ():
        yield from _parts(part)


def _some(tensor: Tensor) -> bytes:
    """Bytes of entries spread over ``tensor``."""
    flat = tensor.detach().reshape(-1)
    chosen = flat[:: max(1, len(flat) // _ENTRIES)].cpu().contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()


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


class TrainerConfig(Protocol):
    """The frozen dataclass of one way to train a policy.

    Environment, policy, source and learner are each built from the config alone, so that a worker that has its JSON
    can build the parts that it needs.  A learner is built right after its policy.
    """

    @property
    def loop(self) -> LoopConfig:
        """How long to train, and how often to validate and save."""

    def build_env(self, context: RunContext) -> VecEnv:
        """The environments of this process to learn in."""

    def build_policy(self, context: RunContext) -> Trainable:
        """The policy to train; it may be ``context.base``, changed in place, or stand on top of it."""

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """What improves ``policy``, with its critic and replay buffer."""

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        """The experience of this process, or of one of its collectors."""

    def windows(self, sources: int) -> int:
        """How many sources' windows an update learns from, where ``sources`` are asynchronous."""

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        """``source``, which joins all processes, or a ``RenewableSource`` around it."""

    def pretrain(self, learner: LoopLearner) -> bool:
        """Learn from recorded data alone, before the first iteration of a run; returns whether anything was learnt.

        What was learnt is saved when this returns; a run that is killed before that begins anew.
        """


@runtime_checkable
class ReadsPixels(Protocol):
    """A policy whose features hold pixels, which its critic has to read through an encoder of its own."""

    def new_vision(self) -> ImageEncoder: ...


class OnPolicyTrainer:
    """What all on-policy trainers share: a value critic, environments that the processes split, others' rollouts."""

    experience: SourceConfig
    algorithm: AlgorithmConfig
    shared: SharingConfig = SharingConfig()

    def build_env(self, context: RunContext) -> VecEnv:
        return context.env.make_training(self.experience.split(context.parts).num_envs)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        self.shared.require_one_process(context.group)
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        vision = policy.new_vision() if isinstance(policy, ReadsPixels) else None
        critic = ValueCritic({**policy.feature_sizes, "time": 1}, vision=vision).to(context.device)
        return self.algorithm.build(
            policy,  # type: ignore[arg-type]  # the algorithm says which protocol it needs
            policy.trainable(),
            critic,
            generator(context.seed, 4),
            context.group,
        )

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        part = self.experience.split(context.parts)
        return part.build(env, policy, context.seeds(), context.exploration())

    def windows(self, sources: int) -> int:
        """As many as there are sources, so that a batch has the size that it has without them."""
        return sources

    def pretrain(self, learner: LoopLearner) -> bool:
        """Nothing: on-policy algorithms learn from their own experience only."""
        return False

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        """With the rollouts of other runs, if ``shared`` names a folder."""
        return self.shared.around(source, policy)


@runtime_checkable
class FlowSampled(Protocol):
    """A flow policy whose exploration noise a trainer chooses."""

    def with_sampler(self, sampler: FlowSampler, final_noise: float) -> Trainable:
        """The same policy with ``sampler``, whose noise falls to ``final_noise`` times itself in the run."""


@dataclass(frozen=True)
class RLConfig(OnPolicyTrainer):
    """On-policy RL of a flow policy itself: its sampler, its experience, the algorithm and the loop."""

    sampler: FlowSampler
    experience: SourceConfig = field(default_factory=WindowConfig)
    final_noise: float = 0.4  # the sampler's noise falls linearly to this share of itself
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)
    shared: SharingConfig = SharingConfig()

    def __post_init__(self) -> None:
        """Raises UserError for a negative share of the noise."""
        check_limits(self, final_noise=(0, math.inf))

    def noise(self) -> str:
        """The exploration in words, for reports."""
        sampler = self.sampler
        return (
            f"{sampler.schedule}, {sampler.placement}, K={sampler.steps}, noise falling to {self.final_noise:.0%} of it"
        )

    def build_policy(self, context: RunContext) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy."""
        base = context.start("RL of a flow policy")
        if not isinstance(base, FlowSampled):
            raise UserError(
                f"{type(base).__name__} has no with_sampler, so RLConfig cannot choose its exploration noise; train it "
                "with OnPolicyRL(StartFrom())."
            )
        return base.with_sampler(self.sampler, self.final_noise)


@dataclass(frozen=True)
class OnPolicyRL(OnPolicyTrainer):
    """On-policy RL of the policy that ``policy`` builds."""

    policy: PolicyConfig
    experience: SourceConfig = field(default_factory=WindowConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)
    shared: SharingConfig = SharingConfig()

    def build_policy(self, context: RunContext) -> Trainable:
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        return placed(self.policy.build(context), context.device)


@dataclass(frozen=True)
class Rewarded:
    """``trainer``, paid for what the reward model in the folder ``reward`` sees (a ``TrainerConfig``).

    The environment's own success still ends episodes and still evaluates the policy, so an exploited reward shows: the
    return rises and validation does not.  Demonstrations in a replay buffer keep the rewards that they were recorded
    with; mix them in only if those are of the same kind.
    """

    trainer: TrainerConfig
    reward: str = "runs/progress/checkpoints/progress"  # a checkpoint folder
    weights: RewardWeights = field(default_factory=RewardWeights)

    @property
    def loop(self) -> LoopConfig:
        return self.trainer.loop

    def build_env(self, context: RunContext) -> VecEnv:
        """The trainer's environments with the model's reward; raises UserError for a folder without a reward model."""
        model = self.model()
        return rewarded(self.trainer.build_env(context), model, self.weights)

    def build_policy(self, context: RunContext) -> Trainable:
        return self.trainer.build_policy(context)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        return self.trainer.build_learner(context, env, policy)

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        return self.trainer.build_source(context, env, policy)

    def windows(self, sources: int) -> int:
        return self.trainer.windows(sources)

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        return self.trainer.whole_source(source, policy)

    def pretrain(self, learner: LoopLearner) -> bool:
        return self.trainer.pretrain(learner)

    def model(self) -> Reward:
        """The reward model; raises UserError for a folder without one."""
        model: Reward = load_reward(self.reward)
        return model
