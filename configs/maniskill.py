"""ManiSkill's tasks from scratch by PPO, from state, on a processor (docs/bring/simulator.md).

    vla-rl train maniskill.py:push_cube

As ManiSkill's own baselines do, it learns from dense rewards, and an episode goes on after success: reward is worth
having for as long as possible, so an end would punish success.
"""

import math

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import ActorConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import CriticConfig, StateBased
from vla_rl.training.loop import LoopConfig


def push_cube() -> Improve:
    """Push a cube to a target that lies in front of it, by changes of the angles of seven joints."""
    ppo = PPOConfig(
        gamma=0.8,
        lam=0.9,
        epochs=8,
        minibatch=200,
        lr=1e-3,
        lr_bounds=(1e-5, 3e-3),
        target_kl=0.06,
        stop_kl=2.0,
        clip_low=0.2,
        clip_high=0.2,
        critic_warmup=1,
    )
    return Improve(
        StateBased(
            ActorConfig(width=128, std=0.6),
            CriticConfig(width=128),
            ppo,
            WindowConfig(num_envs=16, decisions=50),
            LoopConfig(iterations=400, validate_every=20, save_every=20, collapse=math.inf),
        ),
        policy="",
        env=EnvConfig("maniskill", {"task": "PushCube-v1", "ends_at_success": False, "workers": 2}),
        evaluation=EvaluationConfig(validation=16, test=100, num_envs=16),
    )
