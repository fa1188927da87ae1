"""PPO reaches the known optimum of a bandit with every flow sampler, and of the point mass with a Gaussian."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.point_mass import optimal_return
from tests.residuals import POINT, StateEncoder, biased_base
from tests.toys import FlowToy, ToyEncoder, all_shown, bandit, bandit_reward, rollout, seeded
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.group_relative import Constant, GRPOConfig, Mean, RLOOConfig, Standardised
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.policy import encode_observation
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble, ValueCritic
from vla_rl.policies.diffusion import Ddim, Ddpm, DiffusionConfig, DiffusionPolicy, DiffusionSampler, Process
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.flow import (
    AllSteps,
    FlowCps,
    FlowDdim,
    FlowNoise,
    FlowOu,
    FlowSampler,
    FlowSde,
    LastStep,
    LastStepFromNoise,
    OneRandomStep,
)
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore

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


@pytest.mark.parametrize("sampler", [REQUIRED[0], pytest.param(REQUIRED[1], marks=pytest.mark.full)], ids=name)
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


@pytest.mark.full
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


FAST = {"lr": 3e-3, "lr_bounds": (1e-5, 1e-2), "target_kl": 0.1}
GRPO = replace(GRPOConfig(), epochs=4, minibatch=256, **FAST)
RLOO = replace(RLOOConfig(), minibatch=64, **FAST)
CASES = {
    "grpo": (GRPO, AllSteps()),
    "grpo-last-step": (GRPO, LastStep()),
    "grpo-mean": (replace(GRPO, baseline=Mean(), averaging=Constant(1)), AllSteps()),
    "grpo-standardized": (replace(GRPO, baseline=Standardised()), AllSteps()),
    "rloo": (RLOO, AllSteps()),
    "rloo-last-step": (RLOO, LastStep()),
}


def grouped(policy, groups, size, generator):
    """The bandit of ``tests.toys`` with ``size`` tries in each of ``groups`` random states."""
    state = (2 * torch.rand(groups, 1, generator=generator) - 1).repeat_interleave(size, 0)
    out, _ = policy.act({"state": state}, {}, "sample", generator)
    reward = bandit_reward(state, out.sample[:, 0])[None, :, None]
    seeds = torch.arange(groups).repeat_interleave(size)[None]
    version = torch.full_like(seeds, policy.version)
    return rollout({"state": torch.stack([state, state])}, out, reward, seeds=seeds, version=version)


@pytest.mark.parametrize(
    ("config", "noisy_steps"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.full] * (name not in ("grpo", "rloo-last-step")))
        for name, case in CASES.items()
    ],
)
def test_grpo_takes_a_flow_policy_to_the_optimum_of_a_bandit(imitated, config, noisy_steps):
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), noisy_steps, 4))
    policy.load_state_dict(imitated)
    assert deployed(policy) < -0.2
    learner = config.build(policy, policy.trainable(), torch.nn.Identity(), seeded(), OneProcess())
    generator = seeded(1)
    for _ in range(20):
        learner.update(grouped(policy, 64, 8, generator))
    assert deployed(policy) > -0.025


@pytest.mark.full
@pytest.mark.parametrize("config", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_grpo_in_the_loop_reaches_the_optimum_of_the_point_mass(config):
    torch.manual_seed(0)
    env, held_out = make("point_mass", num_envs=64), make("point_mass", num_envs=64)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=1))
    learner = config.build(policy, policy.trainable(), torch.nn.Identity(), seeded(), OneProcess())
    source = GroupConfig(groups=16, size=8, ahead=4).build(env, policy, SeedStream(0, 10**6), seeded(1))
    validate = lambda: evaluate(held_out, policy, range(10**6, 10**6 + 64), 2).rate  # noqa: E731
    assert regret(policy)[1] < 0.2
    best = Loop(source, learner, PolicyStore(policy), validate, LoopConfig(20, 10)).run()
    missing, success = regret(policy)
    assert best.score > 0.95 and missing < 0.6 and success > 0.95


SHARED = {
    "epochs": 4,
    "minibatch": 256,
    "lr": 3e-3,
    "critic_lr": 3e-3,
    "lr_bounds": (1e-5, 1e-2),
    "critic_warmup": 1,
    "target_kl": 0.1,
}
DPPO, PPO_OF_STEPS = DPPOConfig(**SHARED), PPOConfig(**SHARED)
PROCESS = Process()
SAMPLERS = {
    "ddim": DiffusionSampler(PROCESS, Ddim(), 5, 5),
    "ddim, last two": DiffusionSampler(PROCESS, Ddim(), 5, 2),
    "ddpm, last five of ten": DiffusionSampler(PROCESS, Ddpm(), 10, 5),
}


@pytest.fixture(scope="module")
def imitated_diffusion():
    """The imitated_diffusion actions are around 0 in every state."""
    torch.manual_seed(0)
    policy = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=48, blocks=2))
    state, chunks = torch.randn(2000, 1, generator=seeded()), 0.2 * torch.randn(2000, 1, 2, generator=seeded(1))
    config = ImitationConfig(fit=FitConfig(steps=300, batch=128, lr=3e-3))
    imitate(policy, all_shown({"state": state}, chunks), config, seeded(2))
    return policy.heads.state_dict()


def made(imitated_diffusion, sampler: DiffusionSampler) -> DiffusionPolicy:
    policy = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=48, blocks=2))
    policy.heads.load_state_dict(imitated_diffusion)
    return policy.with_sampler(sampler)


def deployed_diffusion(policy) -> float:
    state = torch.linspace(-1, 1, 512)[:, None]
    out, _ = policy.act({"state": state}, {}, "eval", seeded(9))
    return float(bandit_reward(state, out.sample[:, 0]).mean())


def learnt(policy, config: PPOConfig, iterations: int) -> float:
    torch.manual_seed(0)
    learner = config.build(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), seeded(), OneProcess())
    generator = seeded(1)
    for _ in range(iterations):
        learner.update(bandit(policy, 512, generator))
    return deployed_diffusion(policy)


@pytest.mark.parametrize(
    ("sampler", "config"),
    [
        pytest.param(
            SAMPLERS[name],
            {"dppo": DPPO, "ppo": PPO_OF_STEPS}[config],
            id=f"{name}-{config}",
            marks=[pytest.mark.full] * ((name, config) != ("ddim, last two", "dppo")),
        )
        for name in SAMPLERS
        for config in ("dppo", "ppo")
    ],
)
def test_a_diffusion_policy_reaches_the_optimum_of_a_bandit(imitated_diffusion, sampler, config):
    policy = made(imitated_diffusion, sampler)
    assert deployed_diffusion(policy) < -0.2
    assert learnt(policy, config, 25) > -0.025


@pytest.mark.full
def test_a_flow_policy_reaches_it_with_dppo_too():
    torch.manual_seed(0)
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4)).pretrain()
    assert deployed_diffusion(policy) < -0.2
    assert learnt(policy, DPPO, 25) > -0.025


BASE = 2.0  # what the base alone loses
HEAD = HeadConfig(width=32, depth=2)


def residual_regret(policy) -> tuple[float, float]:
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
    before = residual_regret(policy)
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
    missing, success = residual_regret(policy)
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
    missing, success = residual_regret(policy)
    assert missing < 0.25 and success > 0.95


# -- older rollouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_stale_rollouts_lead_to_the_optimum(imitated, name, age):
    """The actor has the weights of ``age`` updates ago, as in a pipeline of that depth."""
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4))
    policy.load_state_dict(imitated)
    torch.manual_seed(0)
    config, actor, generator = CONFIG if name == "ppo" else GRPO, copy.deepcopy(policy), seeded(1)
    learner = config.build(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), seeded(), OneProcess())
    published, ages = deque([copy.deepcopy(policy.state_dict())], maxlen=age + 1), []
    for update in range(20 + 2 * age):
        actor.load_state_dict(published[0])
        actor.version = max(0, update - age)
        rollout = bandit(actor, 512, generator) if name == "ppo" else grouped(actor, 64, 8, generator)
        ages.append(learner.update(rollout)["rollout/age"])
        policy.version += 1
        published.append(copy.deepcopy(policy.state_dict()))
    assert ages[-1] == age and deployed(policy) > -0.025
