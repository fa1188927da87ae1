"""The demo: lift, thirty demonstrations, Flow-SDE on the last denoising step."""

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.cli.recipes import Demo, Imitate, Improve
from vla_rl.cli.stages import EvaluationConfig, RLConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.fit import FitConfig
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.on_policy import LoopConfig

RL = RLConfig(FlowSampler(FlowSde(0.5), LastStep(), 4))


def demo() -> Demo:
    """What ``make demo`` runs."""
    return Demo(RL)


def imitate() -> Imitate:
    """Its first half: a policy by imitation."""
    return Imitate()


def improve() -> Improve:
    """Its second half: ``--policy`` names the checkpoint to start from."""
    return Improve(RL)
