"""Policy, rollout and learner on a GPU; each test also runs on the processor, which shows that it is sound."""

from __future__ import annotations

import math

import pytest
import torch

from sims.catalog import make
from tests.toys import seeded
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import Features
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENVS, DECISIONS = 6, 8


def policy_on(device: str) -> GaussianPolicy:
    torch.manual_seed(0)
    return GaussianPolicy(make("point_mass", num_envs=1).spec, config=GaussianConfig(horizon=1, width=16)).to(device)


def source_on(device: str) -> RolloutSource:
    env = make("point_mass", num_envs=ENVS)
    return RolloutSource(env, policy_on(device), DECISIONS, SeedStream(0, 10**6), seeded(1))


def places(rollout: Rollout) -> set[str]:
    tensors = [rollout.sample, rollout.logprob, rollout.reward, rollout.valid, rollout.seeds, rollout.task]
    return {item.device.type for item in [*tensors, *rollout.features.values(), *rollout.final_features.values()]}


def first_log_ratio(policy: GaussianPolicy, rollout: Rollout) -> float:
    features: Features = {name: item[:-1].flatten(0, 1) for name, item in rollout.features.items()}
    found = policy.log_prob(features, rollout.sample.flatten(0, 1), {}).logprob
    return float((found.detach() - rollout.logprob.flatten()).abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_a_rollout_lies_where_the_policy_is(device):
    source = source_on(device)
    policy = source.policy
    critic = ValueCritic({"state": 2, "time": 1}, width=8).to(device)
    config = PPOConfig(epochs=2, minibatch=16, critic_warmup=0, stop_kl=math.inf)
    ppo = PPO(policy, policy.trainable(), critic, config, seeded())
    before = [item.clone() for item in policy.parameters()]
    for _ in range(2):
        rollout = source.next()
        assert places(rollout) == {device} and rollout.info["time/sync_s"] > 0
        assert first_log_ratio(policy, rollout) <= 1e-5 * math.sqrt(rollout.sample.shape[-1])
        assert all(math.isfinite(value) for value in ppo.update(rollout).values())
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))
    assert all(item.isfinite().all() and item.device.type == device for item in policy.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_saved_on_the_device_goes_on_on_the_host(device):
    there, here = source_on(device), source_on("cpu")
    there.next()
    here.load_state_dict(there.state_dict())
    one, other = there.next(), here.next()
    assert torch.equal(one.seeds.cpu(), other.seeds) and torch.equal(one.valid.cpu(), other.valid)
    assert torch.allclose(one.sample.cpu(), other.sample, atol=1e-3)
