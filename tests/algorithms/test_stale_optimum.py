"""PPO and GRPO reach the known optimum of a bandit from rollouts that are 1, 4 and 16 updates old."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch

from tests.algorithms.test_optimum import CONFIG as PPO
from tests.algorithms.test_optimum import GRPO, deployed, grouped
from tests.toys import FlowToy, bandit, seeded
from vla_rl.contract.batch import OneProcess
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde


@pytest.mark.parametrize("age", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_stale_rollouts_lead_to_the_optimum(imitated, name, age):
    """The actor has the weights of ``age`` updates ago, as in a pipeline of that depth."""
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4))
    policy.load_state_dict(imitated)
    torch.manual_seed(0)
    config, actor, generator = PPO if name == "ppo" else GRPO, copy.deepcopy(policy), seeded(1)
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
