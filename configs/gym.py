"""Gymnasium's tasks from scratch by PPO: continuous and discrete actions, state and pixels.

    vla-rl train gym.py:task --env.options '{"id": "LunarLander-v3"}'

trains on any id of Gymnasium.  The MuJoCo tasks need ``pip install 'gymnasium[mujoco]'``.
"""

import math
from dataclasses import replace

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.sac import SACConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import ActorConfig, SquashedConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import CriticConfig, Improve, StateBased
from vla_rl.recipes.policies import SquashedActor
from vla_rl.recipes.trainers import OffPolicyRL, ReplayConfig
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


def task() -> StateBased:
    """Any id: give ``--env.options '{"id": ...}'``, and for images ``--policy.cameras image``."""
    return StateBased(
        EnvConfig("gym", {"id": "Acrobot-v1"}),
        algorithm=PPO,
        experience=WindowConfig(num_envs=16, decisions=128),
        loop=LoopConfig(iterations=100, validate_every=10, save_every=10, collapse=math.inf),
    )


def half_cheetah() -> StateBased:
    """Run: a planar cheetah with six joints."""
    return StateBased(
        EnvConfig("gym", {"id": "HalfCheetah-v5"}),
        policy=ActorConfig(std=0.6, activation="elu"),
        critic=CriticConfig(activation="elu"),
        algorithm=replace(PPO, lr=4e-3, critic_lr=3e-3, target_kl=0.06),
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
        policy=ActorConfig(std=0.6),
        algorithm=PPO,
        experience=WindowConfig(num_envs=32, decisions=64, privileged=("privileged/speed",)),
        loop=LoopConfig(iterations=250, validate_every=25, save_every=25, collapse=math.inf),
    )


def cartpole() -> StateBased:
    """Balance a pole on a cart that is pushed left or right: discrete actions, a categorical policy, seconds."""
    return replace(inverted_pendulum(), env=EnvConfig("gym", {"id": "CartPole-v1"}))


def pendulum() -> StateBased:
    """Swing a pendulum up and hold it there."""
    algorithm = replace(PPO, gamma=0.9, epochs=10, minibatch=512)
    return replace(task(), env=EnvConfig("gym", {"id": "Pendulum-v1"}), algorithm=algorithm)


def sac() -> Improve:
    """Swing the pendulum up by SAC, from nothing: few control steps, and a gradient step for each of them.

    For any task with continuous actions: ``--env point_mass``, or ``--env.options '{"id": ...}'``.
    """
    small = HeadConfig(width=64)
    algorithm = SACConfig(
        batch=128, learning_starts=500, critic=small, lr=1e-3, critic_lr=1e-3, temperature=0.1, temperature_lr=1e-3
    )
    trainer = OffPolicyRL(
        SquashedActor(SquashedConfig(head=small)),
        WindowConfig(num_envs=8, decisions=8),
        replay=ReplayConfig(n_step=1, share=0.0),
        loop=LoopConfig(100_000, 0, save_every=50, collapse=math.inf, env_steps=20_000, validate_steps=2_000),
        algorithm=algorithm,
    )
    evaluation = EvaluationConfig(validation=16, test=64, num_envs=16)
    return Improve(trainer, policy="", env=EnvConfig("gym", {"id": "Pendulum-v1"}), evaluation=evaluation)


def pixels() -> StateBased:
    """Catch a falling ball that is only seen: pictures of 20 x 20 pixels, discrete actions, a minute."""
    return StateBased(
        EnvConfig("gym", {"id": "sims.catch:vla_rl/Catch-v0"}),
        policy=ActorConfig(cameras=("image",)),
        algorithm=replace(PPO, minibatch=256, lr_bounds=(1e-5, 1e-3)),
        experience=WindowConfig(num_envs=16, decisions=36),
        loop=LoopConfig(iterations=60, validate_every=10, save_every=10, collapse=math.inf),
        evaluation=EvaluationConfig(validation=32, test=256, num_envs=16),
    )
