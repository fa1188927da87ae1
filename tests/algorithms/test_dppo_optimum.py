"""A diffusion policy reaches the known optimum of a bandit: step by step with DPPO, by its joint ratio with PPO."""

from __future__ import annotations

import pytest
import torch

from tests.toys import FlowToy, ToyEncoder, all_shown, bandit, bandit_reward
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy
from vla_rl.policies.diffusion_steps import Ddim, Ddpm, DiffusionSampler, Process
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate

SHARED = {
    "epochs": 4,
    "minibatch": 256,
    "lr": 3e-3,
    "critic_lr": 3e-3,
    "lr_bounds": (1e-5, 1e-2),
    "critic_warmup": 1,
    "target_kl": 0.1,
}
DPPO, PPO = DPPOConfig(**SHARED), PPOConfig(**SHARED)
PROCESS = Process()
SAMPLERS = {
    "ddim": DiffusionSampler(PROCESS, Ddim(), 5, 5),
    "ddim, last two": DiffusionSampler(PROCESS, Ddim(), 5, 2),
    "ddpm, last five of ten": DiffusionSampler(PROCESS, Ddpm(), 10, 5),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def imitated():
    """The imitated actions are around 0 in every state."""
    torch.manual_seed(0)
    policy = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=48, blocks=2))
    state, chunks = torch.randn(2000, 1, generator=seeded()), 0.2 * torch.randn(2000, 1, 2, generator=seeded(1))
    config = ImitationConfig(fit=FitConfig(steps=300, batch=128, lr=3e-3))
    imitate(policy, all_shown({"state": state}, chunks), config, seeded(2))
    return policy.heads.state_dict()


def made(imitated, sampler: DiffusionSampler) -> DiffusionPolicy:
    policy = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=48, blocks=2))
    policy.heads.load_state_dict(imitated)
    return policy.with_sampler(sampler)


def deployed(policy) -> float:
    state = torch.linspace(-1, 1, 512)[:, None]
    out, _ = policy.act({"state": state}, {}, "eval", seeded(9))
    return float(bandit_reward(state, out.sample[:, 0]).mean())


def learnt(policy, config: PPOConfig, iterations: int) -> float:
    torch.manual_seed(0)
    learner = config.build(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), seeded(), OneProcess())
    generator = seeded(1)
    for _ in range(iterations):
        learner.update(bandit(policy, 512, generator))
    return deployed(policy)


@pytest.mark.parametrize(
    ("sampler", "config"),
    [
        pytest.param(
            SAMPLERS[name],
            {"dppo": DPPO, "ppo": PPO}[config],
            id=f"{name}-{config}",
            marks=[pytest.mark.full] * ((name, config) != ("ddim, last two", "dppo")),
        )
        for name in SAMPLERS
        for config in ("dppo", "ppo")
    ],
)
def test_a_diffusion_policy_reaches_the_optimum_of_a_bandit(imitated, sampler, config):
    policy = made(imitated, sampler)
    assert deployed(policy) < -0.2
    assert learnt(policy, config, 25) > -0.025


@pytest.mark.full
def test_a_flow_policy_reaches_it_with_dppo_too():
    torch.manual_seed(0)
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4)).pretrain()
    assert deployed(policy) < -0.2
    assert learnt(policy, DPPO, 25) > -0.025
