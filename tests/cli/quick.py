"""A config for the tests of the commands: reinforcement learning from any checkpoint, an iteration in a moment."""

from vla_rl.cli.method import RLConfig
from vla_rl.cli.recipes import Improve
from vla_rl.cli.stages import EvaluationConfig
from vla_rl.cli.world import World
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.loop import LoopConfig


def improve() -> Improve:
    """Four iterations, validated after each."""
    return Improve(
        RLConfig(FlowSampler(FlowSde(0.5), LastStep(), 4), WindowConfig(4, 2), loop=LoopConfig(4, validate_every=1)),
        world=World(options={"deadline": 5}),
        evaluation=EvaluationConfig(validation=4, test=4, sanity=4, rows=4),
    )
