"""Gymnasium's MuJoCo tasks: a Gaussian MLP from scratch by PPO (``pip install 'gymnasium[mujoco]'``)."""

import math
from dataclasses import replace

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.gaussian import GaussianConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.state_ppo import StateBased
from vla_rl.training.loop import LoopConfig

PPO = PPOConfig(
    epochs=5,
    minibatch=512,
    lr=1e-3,
    lr_bounds=(1e-5, 1e-2),
    target_kl=0.02,
    stop_kl=2.0,
    clip_low=0.2,
    clip_high=0.2,
    critic_warmup=1,
)


def half_cheetah() -> StateBased:
    """Run: a planar cheetah with six joints."""
    return StateBased(
        EnvConfig("gym", {"id": "HalfCheetah-v5"}),
        policy=GaussianConfig(std=0.6),
        algorithm=replace(PPO, target_kl=0.04),
        experience=WindowConfig(num_envs=32, decisions=64),
        loop=LoopConfig(iterations=250, validate_every=25, save_every=25, collapse=math.inf),
    )


def inverted_pendulum() -> StateBased:
    """Balance a pole on a cart: seconds."""
    return StateBased(
        EnvConfig("gym", {"id": "InvertedPendulum-v5"}),
        algorithm=PPO,
        experience=WindowConfig(num_envs=16, decisions=64),
        loop=LoopConfig(iterations=60, validate_every=5, save_every=5, collapse=math.inf),
    )


def asymmetric_hopper() -> StateBased:
    """Hop on one leg; only the critic sees how fast the torso moves (forwards, upwards)."""
    return StateBased(
        EnvConfig("gym", {"id": "Hopper-v5", "privileged": {"speed": [5, 6]}}),
        policy=GaussianConfig(std=0.6),
        algorithm=PPO,
        experience=WindowConfig(num_envs=32, decisions=64, privileged=("privileged/speed",)),
        loop=LoopConfig(iterations=250, validate_every=25, save_every=25, collapse=math.inf),
    )
