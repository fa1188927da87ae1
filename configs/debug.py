"""The demo in about a minute, for trying out changes and for the tests: few iterations, few episodes."""

from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import NewTiny
from vla_rl.recipes.stages import EvaluationConfig
from vla_rl.recipes.trainers import RLConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.imitation import GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig


def small() -> Demo:
    """Everything the demo does, with a smaller policy and more demonstrations instead of more learning."""
    return Demo(
        RLConfig(
            FlowSampler(FlowSde(0.5), LastStep(), 4),
            WindowConfig(num_envs=64),
            loop=LoopConfig(6, validate_every=3, collectors=2),
        ),
        env=EnvConfig("lift", training_options={"deadline": 25}),
        new=NewTiny(width=128, blocks=2),
        grounding=GroundingConfig(1500, FitConfig(300, batch=32, lr=2e-3)),
        imitation=ImitationConfig(120, stride=3, draws=4, fit=FitConfig(500, lr=2e-3)),
        evaluation=EvaluationConfig(validation=64, test=64, ablation=128, processes=2),
    )
