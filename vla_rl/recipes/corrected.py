"""Improvement by a person's corrections: HG-DAgger in simulation, where a scripted person watches the robots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vla_rl.algorithms.hg_dagger import HGDagger, HGDaggerConfig
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.experience.help import Escalation
from vla_rl.experience.helped import HelpedEnv
from vla_rl.experience.person import PersonConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.experience.supervised import SupervisedEnv
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitating import ImitatingTrainer
from vla_rl.recipes.trainers import SourceConfig
from vla_rl.training.loop import LoopConfig, LoopLearner


@dataclass(frozen=True)
class Corrected(ImitatingTrainer):
    """HG-DAgger of a flow policy (a ``TrainerConfig``); it runs in one process.

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
        """Raises UserError for an environment without a scripted expert, and for several processes."""
        self.require_one_process(context, "HG-DAgger")
        if not isinstance(context.env, EnvConfig):
            raise UserError(
                f"{type(context.env).__name__} has no scripted expert, so nobody can correct the policy; train in an "
                "environment of the catalogue with share_env off."
            )
        progress: Callable[[Observation], np.ndarray] = load(self.progress)
        env = context.env.make_training(self.experience.num_envs)
        expert = context.env.make_expert().act
        if self.help is not None:
            return HelpedEnv(env, expert, progress, self.person, self.help)
        return SupervisedEnv(env, expert, progress, self.person)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, if there are any (``--demonstrations``), are imitated beside the corrections."""
        wanted = context.demonstrations and self.algorithm.alpha
        shown = self.recorded(context, policy, "HG-DAgger") if wanted else None
        return HGDagger(policy, policy.trainable(), shown, self.algorithm, generator(context.seed, 4))
