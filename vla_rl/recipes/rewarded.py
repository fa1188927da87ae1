"""Any way to improve a policy, in any world, paid for what a reward model sees instead of what the world says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vla_rl.contract.env import VecEnv
from vla_rl.recipes.env_config import EnvFactory
from vla_rl.recipes.trainers import RunContext, TrainerConfig, TrainingSetup
from vla_rl.rewards.env import RewardWeights, rewarded
from vla_rl.rewards.reward import Reward, load_reward
from vla_rl.training.loop import LoopConfig


@dataclass(frozen=True)
class RewardedWorld:
    """A world, simulated or imagined, in which learning is paid for what ``reward`` sees (``EnvFactory``)."""

    env: EnvFactory
    reward: Reward
    weights: RewardWeights

    def make(self, rows: int) -> VecEnv:
        """The world as it is: policies are judged by what it says itself."""
        return self.env.make(rows)

    def make_training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""
        return rewarded(self.env.make_training(rows), self.reward, self.weights)


@dataclass(frozen=True)
class Rewarded:
    """``method``, paid for what the reward model in the folder ``reward`` sees (``TrainerConfig``).

    The world's own success still ends episodes and still judges the policy, so that a reward that is exploited shows:
    what is earned rises and validation does not.  Demonstrations in a memory keep the rewards that they were recorded
    with; mix them in only if these are of the same kind.
    """

    method: TrainerConfig
    reward: str = "runs/progress/checkpoints/progress"  # a checkpoint folder
    weights: RewardWeights = field(default_factory=RewardWeights)

    @property
    def loop(self) -> LoopConfig:
        """That of the method."""
        return self.method.loop

    def assemble(self, context: RunContext) -> TrainingSetup:
        """What the method makes in the rewarded world; raises UserError for a folder without a reward model."""
        return self.method.assemble(replace(context, env=RewardedWorld(context.env, self.model(), self.weights)))

    def model(self) -> Reward:
        """The reward model; raises UserError for a folder without one."""
        model: Reward = load_reward(self.reward)
        return model
