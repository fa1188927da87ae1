"""How the straight policy learns on the rail."""

from dataclasses import dataclass

from straight import Straight

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import StartFrom
from vla_rl.recipes.trainers import OnPolicyRL
from vla_rl.training.loop import LoopConfig


@dataclass(frozen=True)
class StraightConfig:
    """A new policy, built by a class of this file."""

    std: float = 0.7

    def build(self, context):
        env = context.env.make(1)
        return Straight(env.spec, self.std)


def built() -> Improve:
    """The config builds the policy."""
    return _on_rail(StraightConfig(), "")


def named() -> Improve:
    """``--policy`` names it."""
    return _on_rail(StartFrom(), "straight:Straight")


def _on_rail(policy: StraightConfig | StartFrom, start: str) -> Improve:
    algorithm = PPOConfig(lr=0.03, lr_bounds=(0.03, 0.03), target_kl=0.05, minibatch=64, critic_warmup=1)
    trainer = OnPolicyRL(policy, WindowConfig(16, 8), LoopConfig(40, validate_every=10), algorithm)
    evaluation = EvaluationConfig(validation=16, test=16, num_envs=4)
    return Improve(trainer, start, env=EnvConfig("rail:make"), evaluation=evaluation)
