"""Improvement by a person's corrections: HG-DAgger in simulation, where a scripted person watches the robots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from vla_rl.algorithms.chunks import Chunks, demonstrated
from vla_rl.algorithms.hg_dagger import HGDagger, HGDaggerConfig
from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.experience.background import CollectingSource
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.person import PersonConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.experience.supervised import SupervisedEnv
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitation import encode_episodes
from vla_rl.recipes.trainers import FlowSampled, SourceConfig
from vla_rl.training.loop import LoopConfig, LoopLearner


@dataclass(frozen=True)
class Corrected:
    """HG-DAgger of a flow policy (a ``TrainerConfig``); it runs in one process.

    A resumed run keeps weights and corrections and begins new episodes: those that a person watches have no snapshots.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    sampler   of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=12))
    sampler: FlowSampler = FlowSampler(FlowSde(0.1), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=30, validate_every=10))
    algorithm: HGDaggerConfig = field(default_factory=HGDaggerConfig)

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for an environment without a scripted expert, and for several processes."""
        if context.group.size > 1 or context.collectors > 1:
            raise UserError(
                "HG-DAgger keeps what a person corrected in one process, so several would learn different things; "
                "start one process with one collector."
            )
        if not isinstance(context.env, EnvConfig):
            raise UserError(
                f"{type(context.env).__name__} has no scripted expert, so nobody can correct the policy; train in an "
                "environment of the catalogue with share_env off."
            )
        progress: Callable[[Observation], np.ndarray] = load(self.progress)
        env = context.env.make_training(self.experience.num_envs)
        return SupervisedEnv(env, context.env.make_expert().act, progress, self.person)

    def build_policy(self, context: RunContext) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy."""
        base = context.start("improvement by corrections")
        if not isinstance(base, FlowSampled):
            raise UserError(
                f"{type(base).__name__} has no with_sampler, so it is no flow policy and cannot be corrected here; "
                "choose a flow policy such as an imitation checkpoint."
            )
        return base.with_sampler(self.sampler, 1.0)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, if there are any (``--demonstrations``), are imitated beside the corrections."""
        recorded = self._recorded(context, policy) if context.demonstrations and self.algorithm.alpha else None
        return HGDagger(policy, policy.trainable(), recorded, self.algorithm, generator(context.seed, 4))

    def _recorded(self, context: RunContext, policy: Trainable) -> Chunks:
        episodes: Demonstrations = context.episodes("HG-DAgger").with_tasks(context.env.spec().tasks)
        features = {name: item.to(context.device) for name, item in encode_episodes(policy, episodes).items()}
        scale, horizon = policy.action_scale, policy.horizon  # type: ignore[attr-defined]  # a flow policy has both
        actions = scale.normalize(torch.as_tensor(episodes.chunks(horizon), device=context.device))
        return demonstrated(features, actions, torch.as_tensor(episodes.task, device=context.device))

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        return self.experience.build(env, policy, context.seeds(), context.exploration())

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        return source

    def pretrain(self, learner: LoopLearner) -> bool:
        """Nothing: the policy that the run starts from has imitated already."""
        return False
