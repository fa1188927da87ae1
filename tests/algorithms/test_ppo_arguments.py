"""What PPO does with each of two arguments that are easily exchanged."""

from __future__ import annotations

from dataclasses import replace

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
    row = _Batch({}, old, {}, old, advantage, torch.ones(1), torch.zeros(1), torch.ones(1, 1).bool(), advantage)
    loss, _ = learner(clip_low=0.2, clip_high=0.3).policy_loss(row, Likelihood(ratio.log(), old, {}))
    assert loss.item() == pytest.approx(-objective)


def test_an_advantage_is_over_the_value_of_where_the_decision_was_made():
    ppo = learner(gamma=0.5)
    state = torch.tensor([[[5.0], [1.0]], [[2.0], [8.0]]])  # A = 2/2 - 5, 8/2 - 1
    out, _ = ppo.policy.act({"state": state[0]}, {}, "sample", torch.Generator())
    no = torch.zeros(1, 2, dtype=torch.bool)
    batch, _ = ppo._make_batch(rollout({"state": state}, out, torch.zeros(1, 2, 1), terminated=no, truncated=no))
    assert batch.advantage.tolist() == pytest.approx([-1, 1]) and batch.returns.tolist() == pytest.approx([1, 4])


def test_a_rescue_is_cut_out_of_the_return():
    """A person acts in the second decision, which earns 1: the first one bootstraps from V at the takeover."""
    ppo = learner(gamma=0.5, lam=0.5)
    value = torch.tensor([1.0, 6.0, 2.0, 8.0])
    state = value[:, None, None]
    outs = [ppo.policy.act({"state": state[t]}, {}, "sample", torch.Generator())[0] for t in range(3)]
    once = rollout({"state": state[:2]}, outs[0], torch.zeros(1, 1, 1))
    no, names = torch.zeros(3, 1, dtype=torch.bool), ("sample", "logprob")
    parts = {name: torch.stack([getattr(out, name) for out in outs]) for name in names}
    parts["aux"] = {name: torch.stack([out.aux[name] for out in outs]) for name in outs[0].aux}
    intervened = torch.tensor([False, True, False])[:, None, None]
    experience = replace(
        once,
        features={"state": state},
        reward=torch.tensor([0.0, 1.0, 4.0])[:, None, None],
        valid=torch.ones(3, 1, 1, dtype=torch.bool),
        intervened=intervened,
        terminated=no,
        truncated=no,
        success=no,
        version=torch.zeros(3, 1, dtype=torch.long),
        **parts,
    )
    batch, metrics = ppo._make_batch(experience)
    assert metrics["rollout/decisions"] == 2
    assert batch.returns.tolist() == [0.5 * 6, 4 + 0.5 * 8], "neither the reward nor the advantage of the rescue"
