"""Every on-policy algorithm and residual TD3 reach the known optimum of a bandit or of the point mass."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

from sims.catalog import make
from tests.off_policy_toys import regret
from tests.residuals import POINT, StateEncoder, biased_base
from tests.toys import FlowToy, ToyEncoder, bandit, bandit_reward, deployed, endless, imitated, rollout, seeded
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.group_relative import Constant, GRPOConfig, Mean, RLOOConfig, Standardised
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.batch import OneProcess
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
from vla_rl.policies.vla.network import linear
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore

FAST = {"lr": 6e-3, "lr_bounds": (1e-5, 1e-2), "target_kl": 0.1, "minibatch": 256, "epochs": 4}
PPO = PPOConfig(**FAST, critic_lr=3e-3, critic_warmup=1)
DPPO = DPPOConfig(**FAST, critic_lr=3e-3, critic_warmup=1)
GRPO, RLOO = GRPOConfig(**FAST), RLOOConfig(**{**FAST, "minibatch": 64, "epochs": RLOOConfig().epochs})
SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)


def in_gate(cases, *names):
    """The cases by name, of which all but ``names`` are marked ``full``."""
    return [pytest.param(case, id=name, marks=[pytest.mark.full] * (name not in names)) for name, case in cases.items()]


def built(config, policy, critic=None):
    torch.manual_seed(0)
    critic = critic or ValueCritic({"state": 1}, width=16)
    return config.build(policy, policy.trainable(), critic, seeded(), OneProcess())


def _learns_the_bandit(policy, config, iterations: int, play=bandit, envs: int = 512) -> None:
    learner, generator = built(config, policy), seeded(1)
    assert deployed(policy) < -0.2
    for _ in range(iterations):
        learner.update(play(policy, envs, generator))
    assert deployed(policy) > -0.025


# -- flow policies ----------------------------------------------------------------------------------------------------


def flow(sampler: FlowSampler) -> FlowToy:
    policy = FlowToy(sampler=sampler)
    policy.load_state_dict(imitated())
    return policy


SAMPLERS = {
    f"{type(schedule).__name__}-{type(noisy_steps).__name__}": FlowSampler(schedule, noisy_steps, 4)
    for schedule in (FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise(0.08, 0.3))
    for noisy_steps in (AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise())
}


@pytest.mark.parametrize("sampler", in_gate(SAMPLERS, "FlowSde-LastStepFromNoise"))
def test_a_flow_policy_reaches_the_optimum_of_a_bandit(sampler):
    _learns_the_bandit(flow(sampler), PPO, 12)


@pytest.mark.full
def test_dppo_takes_a_flow_policy_to_the_optimum_too():
    _learns_the_bandit(flow(SDE), DPPO, 15)


CASES = {
    "grpo": (GRPO, AllSteps()),
    "grpo-last-step": (GRPO, LastStep()),
    "grpo-mean": (replace(GRPO, baseline=Mean(), averaging=Constant(1)), AllSteps()),
    "grpo-standardized": (replace(GRPO, baseline=Standardised()), AllSteps()),
    "rloo": (RLOO, AllSteps()),
    "rloo-last-step": (RLOO, LastStep()),
}


def grouped(policy, num_envs, generator):
    """The bandit of ``tests.toys`` with eight tries in each of ``num_envs / 8`` random states."""
    state = (2 * torch.rand(num_envs // 8, 1, generator=generator) - 1).repeat_interleave(8, 0)
    out, _ = policy.act({"state": state}, {}, "sample", generator)
    reward = bandit_reward(state, out.sample[:, 0])[None, :, None]
    seeds = torch.arange(num_envs // 8).repeat_interleave(8)[None]
    version = torch.full_like(seeds, policy.version)
    return rollout({"state": torch.stack([state, state])}, out, reward, seeds=seeds, version=version)


@pytest.mark.parametrize("case", in_gate(CASES, "grpo", "rloo-last-step"))
def test_grpo_takes_a_flow_policy_to_the_optimum_of_a_bandit(case):
    config, noisy_steps = case
    _learns_the_bandit(flow(replace(SDE, placement=noisy_steps)), config, 12, grouped)


class Rounded(nn.Sequential):
    """Computes in bfloat16 from float32 weights, as the layers of a vision-language-action model do."""

    def forward(self, x):
        x = x.bfloat16()
        for part in self:
            x = linear(part, x) if isinstance(part, nn.Linear) else part(x)
        return x.float()


@pytest.mark.full
@pytest.mark.parametrize(("config", "play"), [(PPO, bandit), (GRPO, grouped)], ids=["ppo", "grpo"])
def test_optima_are_reached_where_networks_compute_in_bfloat16(config, play):
    policy = flow(SDE)
    policy.net = Rounded(*policy.net)
    _learns_the_bandit(policy, config, 12, play)


@pytest.mark.parametrize(
    ("config", "age"),
    [
        (PPO, 4),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(PPO, 1), (PPO, 16), (GRPO, 1), (GRPO, 4), (GRPO, 16)]
        ),
    ],
)
def test_stale_rollouts_lead_to_the_optimum(config, age):
    """The actor has the weights of ``age`` updates ago, as in a pipeline of that depth."""
    policy = flow(SDE)
    learner, actor, generator = built(config, policy), copy.deepcopy(policy), seeded(1)
    published, ages = deque([copy.deepcopy(policy.state_dict())], maxlen=age + 1), []
    for update in range(12 + 2 * age):
        actor.load_state_dict(published[0])
        actor.version = max(0, update - age)
        ages.append(learner.update((bandit if config is PPO else grouped)(actor, 512, generator))["rollout/age"])
        policy.version += 1
        published.append(copy.deepcopy(policy.state_dict()))
    assert ages[-1] == age and deployed(policy) > -0.025


# -- diffusion policies -----------------------------------------------------------------------------------------------


def diffusion() -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=48, blocks=2))


@pytest.fixture(scope="module")
def imitated_diffusion():
    """The imitated actions are around 0 in every state."""
    policy = diffusion()
    state, chunks = torch.randn(2000, 1, generator=seeded()), 0.2 * torch.randn(2000, 1, 2, generator=seeded(1))
    config = ImitationConfig(fit=FitConfig(steps=150, batch=64, lr=6e-3))
    imitate(policy, endless({"state": state}, chunks), config, seeded(2))
    return policy.heads.state_dict()


DIFFUSIONS = {
    f"{name}-{algorithm}": (sampler, config)
    for name, sampler in {
        "ddim": DiffusionSampler(Process(), Ddim(), 5, 5),
        "ddim, last two": DiffusionSampler(Process(), Ddim(), 5, 2),
        "ddpm, last five of ten": DiffusionSampler(Process(), Ddpm(), 10, 5),
    }.items()
    for algorithm, config in {"dppo": DPPO, "ppo": PPO}.items()
}


@pytest.mark.parametrize("case", in_gate(DIFFUSIONS))
def test_a_diffusion_policy_reaches_the_optimum_of_a_bandit(imitated_diffusion, case):
    sampler, config = case
    policy = diffusion()
    policy.heads.load_state_dict(imitated_diffusion)
    _learns_the_bandit(policy.with_sampler(sampler), config, 20)


# -- the point mass ---------------------------------------------------------------------------------------------------

HEAD = HeadConfig(width=32, depth=2)


def collected(policy, num_envs: int) -> RolloutSource:
    return RolloutSource(make("point_mass", num_envs=num_envs), policy, 16, SeedStream(0, 10**9), seeded(1))


@pytest.mark.full
def test_a_gaussian_policy_reaches_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    policy = GaussianPolicy(POINT, config=GaussianConfig(horizon=1))
    ppo = built(
        replace(PPO, gamma=0.95, epochs=6, target_kl=0.05), policy, ValueCritic({"state": 2, "time": 1}, width=64)
    )
    source = collected(policy, 64)
    assert regret(policy)[1] < 0.2
    for _ in range(25):
        metrics = ppo.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.3 and success > 0.95 and metrics["critic/explained_variance"] > 0.8


@pytest.mark.full
@pytest.mark.parametrize("config", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_grpo_in_the_loop_reaches_the_optimum_of_the_point_mass(config):
    torch.manual_seed(0)
    env, held_out = make("point_mass", num_envs=64), make("point_mass", num_envs=64)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=1))
    source = GroupConfig(groups=16, size=8, ahead=4).build(env, policy, SeedStream(0, 10**6), seeded(1))
    validate = lambda: evaluate(held_out, policy, range(10**6, 10**6 + 64), 2).rate  # noqa: E731
    assert regret(policy)[1] < 0.2
    best = Loop(
        source, built(replace(config, lr=3e-3), policy), PolicyStore(policy), validate, LoopConfig(20, 10)
    ).run()
    missing, success = regret(policy)
    assert best.score > 0.95 and missing < 0.6 and success > 0.95


@pytest.mark.full
def test_td3_reaches_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    config = ResidualConfig(scale=0.5, plan=3, noise=0.2, correlation=0.0, head=HEAD)
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), config)
    before = regret(policy)
    assert before[0] > 2.0 and before[1] == 0
    critic = QEnsemble(policy.feature_sizes, 2, 2, HEAD)
    numbers = ResidualTD3Config(
        batch=64,
        utd_ratio=0.1,
        learning_starts=300,
        critic_warmup=50,
        lr=4e-3,
        critic_lr=4e-3,
        tau=0.05,
        value_bounds=(-20.0, 0.0),
    )
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(20_000, 0.9, 3), numbers, seeded())
    source = collected(policy, 32)
    for _ in range(9):
        td3.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.5 and success > 0.95


@pytest.mark.full
def test_ppo_takes_a_residual_to_the_optimum_of_the_point_mass():
    torch.manual_seed(0)
    config = ResidualConfig(scale=0.5, plan=3, noise=0.3, head=HEAD)
    policy = GaussianResidual(biased_base(), StateEncoder(POINT), config)
    ppo = built(
        replace(PPO, epochs=6, target_kl=0.05, gamma=0.9),
        policy,
        ValueCritic({**policy.feature_sizes, "time": 1}, width=64),
    )
    source = collected(policy, 64)
    for _ in range(15):
        ppo.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.25 and success > 0.95
