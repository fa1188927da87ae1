"""Learn a world model from few episodes, and improve a policy in its dreams."""

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.cli.imagine import Imagine
from vla_rl.cli.method import RLConfig
from vla_rl.cli.world import World
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.loop import LoopConfig
from world_models.env import DreamConfig
from world_models.keyframes import KeyframeConfig
from world_models.model import WorldConfig


def lift() -> Imagine:
    """The demo's task and PPO, in dreams of 25 control steps."""
    method = RLConfig(
        FlowSampler(FlowSde(0.6), LastStep(), 4),
        WindowConfig(rows=64, decisions=5),
        loop=LoopConfig(iterations=60, validate_every=10),
        algorithm=PPOConfig(),
    )
    dream = DreamConfig(horizon=25, deadline=25)
    return Imagine(method, WorldConfig(), dream, KeyframeConfig(), world=World(training_options={"deadline": 25}))
