"""Improvement by imitating one's own successes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from vla_rl.algorithms.future_states import FutureStates, FutureStatesConfig, require_learning_backbone
from vla_rl.algorithms.self_imitation import SelfImitation, SelfImitationConfig
from vla_rl.contract.env import VecEnv
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.imitating import ImitatingTrainer
from vla_rl.recipes.trainers import SourceConfig
from vla_rl.training.loop import LoopConfig, LoopLearner


@dataclass(frozen=True)
class SelfImitated(ImitatingTrainer):
    """Self-imitation of a flow policy (a ``TrainerConfig``); it runs in one process.

    experience  long windows: only episodes that begin and end within one count
    sampler     of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    future      of the states that the policy's backbone learns to foresee; None: the backbone stays frozen
    """

    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=40))
    sampler: FlowSampler = FlowSampler(FlowSde(0.02), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=24, validate_every=8, collapse=math.inf))
    algorithm: SelfImitationConfig = field(default_factory=SelfImitationConfig)
    future: FutureStatesConfig | None = None

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for several processes."""
        self.require_one_process(context, "self-imitation")
        return context.env.make_training(self.experience.num_envs)

    def build_policy(self, context: RunContext) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy, whose backbone can learn if asked."""
        policy = super().build_policy(context)
        if self.future is not None:
            require_learning_backbone(policy, "self-imitation").with_trained_backbone()
        return policy

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, where ``alpha`` is above 0 and there are any, are imitated beside the successes."""
        wanted = context.demonstrations and self.algorithm.alpha
        shown = self.recorded(context, policy, "self-imitation") if wanted else None
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        head = FutureStates(policy.feature_sizes, self.future).to(context.device) if self.future else None
        noise = generator(context.seed, 4)
        return SelfImitation(policy, policy.trainable(), shown, self.algorithm, noise, future=head)
