"""Any trainer, in any environment, paid for what a reward model sees instead of the environment's own reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.env import VecEnv
from vla_rl.experience.background import CollectingSource
from vla_rl.recipes.context import RunContext, Trainable
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.rewards.env import RewardWeights, rewarded
from vla_rl.rewards.reward import Reward, load_reward
from vla_rl.training.loop import LoopConfig, LoopLearner


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
