"""What PPO does with each of two arguments that are easily exchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.toys import FlowToy, rollout
from vla_rl.algorithms.ppo import PPO, PPOConfig, _Batch
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import FlowSde


class Known(nn.Module):
    """A critic whose value is the first entry of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features):
        return features["state"][..., 0]


def learner(**changes):
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4), width=16)
    return PPO(policy, policy.trainable(), Known(), PPOConfig(**changes), torch.Generator())


@pytest.mark.parametrize(("ratio", "advantage", "objective"), [(1.5, 1.0, 1.3), (0.5, -1.0, -0.8)])
def test_each_bound_clips_its_own_side(ratio, advantage, objective):
    old, ratio, advantage = torch.zeros(1), torch.tensor([ratio]), torch.tensor([advantage])
    row = _Batch({}, old, {}, old, advantage, torch.ones(1), torch.zeros(1), advantage)
    loss, _ = learner(clip_low=0.2, clip_high=0.3).policy_loss(row, Likelihood(ratio.log(), old, {}))
    assert loss.item() == pytest.approx(-objective)


def test_an_advantage_is_over_the_value_of_where_the_decision_was_made():
    ppo = learner(gamma=0.5)
    state = torch.tensor([[[5.0], [1.0]], [[2.0], [8.0]]])  # A = 2/2 - 5, 8/2 - 1
    out, _ = ppo.policy.act({"state": state[0]}, {}, "sample", torch.Generator())
    no = torch.zeros(1, 2, dtype=torch.bool)
    batch, _ = ppo._make_batch(rollout({"state": state}, out, torch.zeros(1, 2, 1), terminated=no, truncated=no))
    assert batch.advantage.tolist() == pytest.approx([-1, 1]) and batch.returns.tolist() == pytest.approx([1, 4])
