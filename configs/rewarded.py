"""Lift and place by what a progress critic sees, not by what a simulator or a world model says; train the critic
first: ``vla-rl train configs/rewards.py:progress`` or ``place_progress`` (``--rl.reward FOLDER`` for another reward
model, such as a vision-language model, ``configs/rewards.py:judge``)."""

from dataclasses import replace

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.collect import CollectConfig
from vla_rl.recipes.imagine.plan import Plan
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import Rewarded, RLConfig
from vla_rl.rewards.env import RewardWeights
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.world_model import WorldModelFit
from world_models.config import ImaginationConfig, WorldModelConfig
from world_models.initial_states import KeyframeConfig

# As in demo.py and imagine.py.
ENV = EnvConfig("lift", training_options={"deadline": 25})
SAMPLER = FlowSampler(FlowSde(0.6), LastStep(), 4)
PLAN = Plan(
    WorldModelConfig(precision="auto"),
    ImaginationConfig(horizon=25, deadline=25),
    KeyframeConfig(),
)
# The way there, and as much again for having arrived.
WEIGHTS = RewardWeights(progress=1.0, done=1.0)


def lift() -> Improve:
    """The demo's PPO in the simulator, from the checkpoint ``--policy``."""
    trainer = RLConfig(SAMPLER, loop=LoopConfig(iterations=200, validate_every=20))
    return Improve(Rewarded(trainer, weights=WEIGHTS), env=ENV)


def imagined() -> Imagine:
    """The same in imagination, otherwise as ``imagine.py:lift``."""
    trainer = RLConfig(
        SAMPLER, WindowConfig(num_envs=128, decisions=5), loop=LoopConfig(iterations=60, validate_every=12)
    )
    return Imagine(Rewarded(trainer, weights=WEIGHTS), PLAN, env=ENV)


# As in tabletop.py and imagine.py.
PLACE = EnvConfig("place", training_options={"deadline": 50})
PLACE_SAMPLER = FlowSampler(FlowSde(0.5), LastStep(), 4)
PLACE_PLAN = replace(
    PLAN,
    imagination=ImaginationConfig(horizon=50, deadline=50, outcome_every=1),
    collect=CollectConfig(1400, 600, calibration=200, held_out=200),
    fit=WorldModelFit(video=FitConfig(5000, 32, 1.5e-3), mode_classifier=FitConfig(4000, 64, 1e-3, weight_decay=1e-2)),
)
PLACE_CRITIC, PLACE_POLICY = "runs/place_progress/checkpoints/progress", "runs/imitate_place/checkpoints/imitation"


def place() -> Improve:
    """Place by PPO in the simulator, from the checkpoint ``--policy``."""
    trainer = RLConfig(
        PLACE_SAMPLER,
        WindowConfig(num_envs=256, decisions=10),
        loop=LoopConfig(iterations=110, validate_every=10),
        algorithm=PPOConfig(minibatch=1280),
    )
    return Improve(Rewarded(trainer, PLACE_CRITIC, WEIGHTS), policy=PLACE_POLICY, env=PLACE)


def place_imagined() -> Imagine:
    """The same in imagination, otherwise as ``imagine.py:place``."""
    trainer = RLConfig(
        PLACE_SAMPLER, WindowConfig(num_envs=128, decisions=10), loop=LoopConfig(iterations=60, validate_every=12)
    )
    return Imagine(Rewarded(trainer, PLACE_CRITIC, WEIGHTS), PLACE_PLAN, policy=PLACE_POLICY, env=PLACE)
