"""Trainers that imitate while they play: of a person's corrections (HG-DAgger), and of their own best episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from vla_rl.algorithms.chunks import Chunks, HGDagger, HGDaggerConfig, ImitationPolicy
from vla_rl.algorithms.self_imitation import (
    FutureStates,
    FutureStatesConfig,
    SelfImitation,
    SelfImitationConfig,
    require_learning_backbone,
)
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.intervention import Escalation, HelpedEnv, PersonConfig, SupervisedEnv
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import demonstrated_chunks, encode_episodes
from vla_rl.recipes.trainers import RunContext, SourceConfig, Trainable, TrainerConfig, generator
from vla_rl.training.loop import LoopConfig, LoopLearner


class ImitatingTrainer(TrainerConfig):
    """A trainer whose learner keeps what it imitates, so it learns in one process."""

    sampler: FlowSampler

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for several processes that learn."""
        if context.group.size > 1:
            raise UserError(
                f"{type(self).__name__} keeps what is imitated in the process that learns, so several would learn "
                "different things; start one process, with collectors beside it."
            )
        return super().build_env(context)

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy."""
        return context.start_flow("improvement by imitation", self.sampler, 1.0)

    def recorded(self, context: RunContext, policy: Trainable, needed_by: str) -> Chunks:
        episodes: Demonstrations = context.episodes(needed_by).with_tasks(context.env.spec().tasks)
        features = {name: item.to(context.device) for name, item in encode_episodes(policy, episodes).items()}
        flow = cast(ImitationPolicy, policy)
        return demonstrated_chunks(flow, episodes, features, flow.horizon)


@dataclass(frozen=True)
class Corrected(ImitatingTrainer):
    """HG-DAgger of a flow policy ; it learns in one process.

    A resumed run keeps weights and corrections and begins new episodes: those that a person watches have no snapshots.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    sampler   of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    help      by degrees instead of a take-over at every visible failure; None: take over
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=12))
    sampler: FlowSampler = FlowSampler(FlowSde(0.1), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=30, validate_every=10))
    algorithm: HGDaggerConfig = field(default_factory=HGDaggerConfig)
    help: Escalation | None = None

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for an environment without a scripted expert, and for several processes that learn."""
        if not isinstance(context.env, EnvConfig):
            raise UserError(
                f"{type(context.env).__name__} has no scripted expert, so nobody can correct the policy; train in an "
                "environment of the catalogue."
            )
        progress: Callable[[Observation], np.ndarray] = load(self.progress)
        env, expert = super().build_env(context), context.env.make_expert().act
        if self.help is not None:
            return HelpedEnv(env, expert, progress, self.person, self.help)
        return SupervisedEnv(env, expert, progress, self.person)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, if there are any (``--demonstrations``), are imitated beside the corrections."""
        shown = self.recorded(context, policy, "HG-DAgger")
        return HGDagger(policy, policy.trainable(), shown, self.algorithm, generator(context.seed, 4))


@dataclass(frozen=True)
class SelfImitated(ImitatingTrainer):
    """Self-imitation of a flow policy ; it learns in one process.

    experience  long windows: only episodes that begin and end within one count
    sampler     of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    future      of the states that the policy's backbone learns to foresee; None: the backbone stays frozen
    """

    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=40))
    sampler: FlowSampler = FlowSampler(FlowSde(0.02), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=24, validate_every=8, collapse=math.inf))
    algorithm: SelfImitationConfig = field(default_factory=SelfImitationConfig)
    future: FutureStatesConfig | None = None

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy, whose backbone can learn if asked."""
        policy = super().build_policy(context, env)
        if self.future is not None:
            require_learning_backbone(policy)
            cast(Any, policy).with_trained_backbone()
        return policy

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, where ``alpha`` is above 0 and there are any, are imitated beside the successes."""
        shown = self.recorded(context, policy, "self-imitation")
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        head = FutureStates(policy.feature_sizes, self.future).to(context.device) if self.future else None
        noise = generator(context.seed, 4)
        return SelfImitation(policy, policy.trainable(), shown, self.algorithm, noise, future=head)
