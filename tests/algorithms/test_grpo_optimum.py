"""GRPO and RLOO reach the known optimum of a bandit with a flow policy, and that of the point mass through groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sims.catalog import make
from tests.algorithms.test_ppo_optimum import deployed, regret, seeded
from tests.toys import FlowToy, bandit_reward, rollout
from vla_rl.algorithms.group_relative import Constant, GRPOConfig, Mean, RLOOConfig, Standardised
from vla_rl.contract.batch import OneProcess
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import SeedStream
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.flow import AllSteps, FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.loop import InProcessPolicyStore, Loop, LoopConfig

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


@pytest.fixture(scope="module")
def imitated():
    torch.manual_seed(0)
    return FlowToy().pretrain().state_dict()


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
def test_a_flow_policy_reaches_the_optimum_of_a_bandit(imitated, config, noisy_steps):
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
def test_a_gaussian_policy_reaches_the_optimum_of_the_point_mass_in_the_loop(config):
    torch.manual_seed(0)
    env, held_out = make("point_mass", num_envs=64), make("point_mass", num_envs=64)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=1))
    learner = config.build(policy, policy.trainable(), torch.nn.Identity(), seeded(), OneProcess())
    source = GroupConfig(groups=16, size=8, ahead=4).build(env, policy, SeedStream(0, 10**6), seeded(1))
    validate = lambda: evaluate(held_out, policy, range(10**6, 10**6 + 64), 2).rate  # noqa: E731
    assert regret(policy)[1] < 0.2
    best = Loop(source, learner, InProcessPolicyStore(policy), validate, LoopConfig(20, 10)).run()
    missing, success = regret(policy)
    assert best.score > 0.95 and missing < 0.6 and success > 0.95
