"""A residual mends a base that errs by the same step again and again: learnt off-policy by TD3 and on-policy by PPO."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.point_mass import optimal_return
from tests.residuals import POINT, StateEncoder, biased_base
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.policy import encode_observation
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble, ValueCritic
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig

BASE = 2.0  # what the base alone loses
HEAD = HeadConfig(width=32, depth=2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regret(policy) -> tuple[float, float]:
    """Mean shortfall from the optimal return, and success, of what would be deployed, on seeds not trained on."""
    env, env_ids = make("point_mass", num_envs=64), np.arange(64)
    obs, state = env.reset(env_ids, 10_000 + env_ids), policy.reset_state(policy.initial_state(64), env_ids)
    missing = optimal_return(obs.state)
    for _ in range(env.spec.time_limit):
        features, state = encode_observation(policy, obs, state, seeded())
        out, state = policy.act(features, state, "eval", seeded())
        step = env.step(out.action.numpy())
        obs, missing = step.obs, missing - step.reward[:, 0]
    return float(missing.mean()), float(step.success.mean())


def test_td3_reaches_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    config = ResidualConfig(scale=0.5, plan=3, noise=0.2, correlation=0.0, head=HEAD)
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), config)
    before = regret(policy)
    assert before[0] > BASE and before[1] == 0
    critic = QEnsemble(policy.feature_sizes, 2, 3, HEAD)
    numbers = ResidualTD3Config(
        batch=64,
        utd_ratio=0.15,
        learning_starts=300,
        critic_warmup=100,
        lr=2e-3,
        critic_lr=2e-3,
        tau=0.03,
        value_bounds=(-20.0, 0.0),
    )
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(20_000, 0.9, 3), numbers, seeded())
    source = RolloutSource(make("point_mass", num_envs=32), policy, 16, SeedStream(0, 10**9), seeded(1))
    for _ in range(12):
        td3.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.5 and success > 0.95


@pytest.mark.full
def test_ppo_reaches_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    config = ResidualConfig(scale=0.5, plan=3, noise=0.3, head=HEAD)
    policy = GaussianResidual(biased_base(), StateEncoder(POINT), config)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=64)
    numbers = PPOConfig(
        epochs=6,
        minibatch=256,
        lr=3e-3,
        critic_lr=3e-3,
        lr_bounds=(1e-5, 1e-2),
        critic_warmup=1,
        target_kl=0.05,
        gamma=0.9,
    )
    ppo = PPO(policy, policy.trainable(), critic, numbers, seeded())
    source = RolloutSource(make("point_mass", num_envs=64), policy, 16, SeedStream(0, 10**9), seeded(1))
    for _ in range(15):
        ppo.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.25 and success > 0.95
