"""Gymnasium's tasks from scratch by PPO: continuous and discrete actions, state and pixels.

    vla-rl train gym.py:task --env.options '{"id": "LunarLander-v3"}'

trains on any id of Gymnasium.  The MuJoCo tasks need ``pip install 'gymnasium[mujoco]'``.
"""

import math
from dataclasses import replace

from vla_rl.algorithms.ppo import RecomputingPPOConfig
from vla_rl.algorithms.sac import SACConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import ActorConfig, SquashedConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import SquashedActor
from vla_rl.recipes.trainers import CriticConfig, OffPolicyRL, ReplayConfig, StateBased, TrainerConfig
from vla_rl.training.loop import LoopConfig

PPO = RecomputingPPOConfig(
    epochs=5,
    minibatch=512,
    lr=1e-3,
    lr_bounds=(1e-5, 1e-2),
    target_kl=0.02,
    stop_kl=2.0,
    clip_low=0.2,
    clip_high=0.2,
    critic_lr=3e-3,
    critic_warmup=1,
)
STATE_BASED = StateBased(
    algorithm=PPO,
    experience=WindowConfig(num_envs=16, decisions=128),
    loop=LoopConfig(iterations=100, validate_every=10, save_every=10, collapse=math.inf),
)


def _from_nothing(rl: TrainerConfig, env: EnvConfig, validation: int = 16, test: int = 64) -> Improve:
    """``rl`` of a policy that it makes itself, in ``env``."""
    return Improve(rl, policy="", env=env, evaluation=EvaluationConfig(validation, test, num_envs=16))


def task() -> Improve:
    """Any id: give ``--env.options '{"id": ...}'``, and for images ``--rl.policy.cameras image``."""
    return _from_nothing(STATE_BASED, EnvConfig("gym", {"id": "Acrobot-v1"}))


def half_cheetah() -> Improve:
    """Run: a planar cheetah with six joints."""
    return _from_nothing(
        StateBased(
            ActorConfig(std=0.6, activation="elu"),
            CriticConfig(activation="elu"),
            replace(PPO, lr=4e-3, target_kl=0.06, critic_warmup=0),
            WindowConfig(num_envs=32, decisions=64),
            LoopConfig(iterations=250, validate_every=25, save_every=25, collapse=math.inf),
        ),
        EnvConfig("gym", {"id": "HalfCheetah-v5"}),
    )


def inverted_pendulum() -> Improve:
    """Balance a pole on a cart: seconds."""
    return _from_nothing(
        StateBased(
            algorithm=PPO,
            experience=WindowConfig(num_envs=16, decisions=64),
            loop=LoopConfig(iterations=60, validate_every=5, save_every=5, collapse=math.inf),
        ),
        EnvConfig("gym", {"id": "InvertedPendulum-v5"}),
    )


def asymmetric_hopper() -> Improve:
    """Hop on one leg; only the critic sees how fast the torso moves (forwards, upwards)."""
    return _from_nothing(
        StateBased(
            ActorConfig(std=0.6),
            algorithm=PPO,
            experience=WindowConfig(num_envs=32, decisions=64, privileged=("privileged/speed",)),
            loop=LoopConfig(iterations=250, validate_every=25, save_every=25, collapse=math.inf),
        ),
        EnvConfig("gym", {"id": "Hopper-v5", "privileged": {"speed": [5, 6]}}),
    )


def cartpole() -> Improve:
    """Balance a pole on a cart that is pushed left or right: discrete actions, a categorical policy, seconds."""
    return replace(inverted_pendulum(), env=EnvConfig("gym", {"id": "CartPole-v1"}))


def pendulum() -> Improve:
    """Swing a pendulum up and hold it there."""
    algorithm = replace(PPO, gamma=0.9, epochs=10, minibatch=512)
    return _from_nothing(replace(STATE_BASED, algorithm=algorithm), EnvConfig("gym", {"id": "Pendulum-v1"}))


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
    return _from_nothing(trainer, EnvConfig("gym", {"id": "Pendulum-v1"}))


def pixels() -> Improve:
    """Catch a falling ball that is only seen: pictures of 20 x 20 pixels, discrete actions, a minute."""
    return _from_nothing(
        StateBased(
            ActorConfig(cameras=("image",)),
            algorithm=replace(PPO, minibatch=256, lr_bounds=(1e-5, 1e-3)),
            experience=WindowConfig(num_envs=16, decisions=36),
            loop=LoopConfig(iterations=60, validate_every=10, save_every=10, collapse=math.inf),
        ),
        EnvConfig("gym", {"id": "sims.catch:vla_rl/Catch-v0"}),
        validation=32,
        test=256,
    )
