"""PPO reaches the known optimum of a bandit with every flow sampler, and of the point mass with a Gaussian."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.point_mass import optimal_return
from tests.toys import FlowToy, bandit, bandit_reward
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.flow import AllSteps, FlowSampler, LastStep, LastStepFromNoise, OneRandomStep
from vla_rl.policies.flow_schedules import FlowCps, FlowDdim, FlowNoise, FlowOu, FlowSde

SCHEDULES = [FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise(0.08, 0.3)]
NOISE_PLACEMENTS = [AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise()]
EVERY = [FlowSampler(schedule, noisy_steps, 4) for schedule in SCHEDULES for noisy_steps in NOISE_PLACEMENTS]
REQUIRED = [FlowSampler(FlowSde(0.5), LastStepFromNoise(), 4), FlowSampler(FlowNoise(0.08, 0.3), AllSteps(), 4)]
CONFIG = PPOConfig(
    epochs=4,
    minibatch=256,
    lr=3e-3,
    critic_lr=3e-3,
    lr_bounds=(1e-5, 1e-2),
    critic_warmup=1,
    target_kl=0.1,
)
name = lambda sampler: f"{type(sampler.schedule).__name__}-{type(sampler.placement).__name__}"  # noqa: E731


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def imitated():
    torch.manual_seed(0)
    return FlowToy().pretrain().state_dict()


def deployed(policy: FlowToy) -> float:
    state = torch.linspace(-1, 1, 512)[:, None]
    out, _ = policy.act({"state": state}, {}, "eval", seeded(9))
    return float(bandit_reward(state, out.sample[:, 0]).mean())


def _reaches_the_optimum(imitated, sampler):
    policy = FlowToy(sampler=sampler)
    policy.load_state_dict(imitated)
    assert deployed(policy) < -0.2
    ppo, generator = PPO(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), CONFIG, seeded()), seeded(1)
    for _ in range(20):
        ppo.update(bandit(policy, 512, generator))
    assert deployed(policy) > -0.025


@pytest.mark.parametrize("sampler", REQUIRED, ids=name)
def test_a_flow_policy_reaches_the_optimum_of_a_bandit(imitated, sampler):
    _reaches_the_optimum(imitated, sampler)


@pytest.mark.full
@pytest.mark.parametrize("sampler", [sampler for sampler in EVERY if sampler not in REQUIRED], ids=name)
def test_every_other_sampler_reaches_the_optimum_too(imitated, sampler):
    _reaches_the_optimum(imitated, sampler)


def regret(policy: GaussianPolicy) -> tuple[float, float]:
    """Mean shortfall from the optimal return, and success, of what would be deployed, on seeds not trained on."""
    env, env_ids = make("point_mass", num_envs=64), np.arange(64)
    obs = env.reset(env_ids, 10_000 + env_ids)
    missing = optimal_return(obs.state)
    for _ in range(env.spec.time_limit):
        out, _ = policy.act(policy.encode(obs), {}, "eval", None)
        step = env.step(out.action.numpy())
        obs, missing = step.obs, missing - step.reward[:, 0]
    return float(missing.mean()), float(step.success.mean())


def test_a_gaussian_policy_reaches_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    env = make("point_mass", num_envs=64)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=1))
    critic = ValueCritic({"state": 2, "time": 1}, width=64)
    config = replace(CONFIG, gamma=0.95, epochs=6, target_kl=0.05)
    ppo = PPO(policy, policy.trainable(), critic, config, seeded())
    source = RolloutSource(env, policy, 16, SeedStream(0, 10**9), seeded(1))
    assert regret(policy)[1] < 0.2
    for _ in range(25):
        metrics = ppo.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.3 and success > 0.95 and metrics["critic/explained_variance"] > 0.8
