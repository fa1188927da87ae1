"""The base of off-policy algorithms: independent critics, minimum of a pair, when actor and critics step, errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.by_hand import Line, Recorded, batch, build, learnt, seeded
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, swapped
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.policies.residual import GaussianResidual


def test_the_minimum_is_over_a_random_pair_without_replacement():
    """Of three constant critics the highest is never the minimum; with replacement it would be one time in nine."""
    td3 = build(num_critics=3, num_min_q=2)
    for parameter in learnt(td3.target_critic):
        nn.init.zeros_(parameter)
    with torch.no_grad():
        td3.target_critic.last.bias.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    found = torch.tensor([float(td3.min_target_q(batch(1).features, torch.zeros(1, 2))) for _ in range(900)])
    assert (found == 3).sum() == 0
    assert float((found == 1).float().mean()) == pytest.approx(2 / 3, abs=0.06)  # four standard errors


def test_targets_are_clamped_to_the_bounds_of_returns():
    td3 = build(value_bounds=(-0.1, 0.2))
    td3.target = lambda found: found.reward
    value = td3.critic(td3.replay.found.features, td3.replay.found.executed.flatten(1)).detach()
    expected = (value - td3.replay.found.reward.clamp(-0.1, 0.2)).square().mean(1).sum()
    assert td3.critic_step(td3.replay.found)["critic/loss"] == pytest.approx(float(expected), rel=1e-5)


def test_each_critic_is_regressed_on_its_own():
    """The gradient of each is that of its own mean squared error: all that couples them is the norm's bound."""
    td3 = build(grad_norm=1e9)
    target = td3.target(td3.replay.found)
    td3.target = lambda found: target
    td3.critic_step(td3.replay.found)
    for head in range(4):
        alone = build()
        value = alone.critic(td3.replay.found.features, td3.replay.found.executed.flatten(1))[head]
        (value - target).square().mean().backward()
        for one, two in zip(learnt(td3.critic), learnt(alone.critic), strict=True):
            torch.testing.assert_close(one.grad[head], two.grad[head], rtol=1e-4, atol=1e-6)


class Table(nn.Module):
    """Heads that are one number each."""

    num_critics = 10

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(3 * torch.rand(10, 1, generator=seeded()) - 1)

    def forward(self, features, action):
        return self.values.expand(10, len(action))


def test_critics_that_start_apart_converge():
    """Bernoulli(1/2) targets, critics in [-1, 2] (algorithms.md 7.6): coupled critics would stay .08 to .96 apart."""
    policy, table, generator = Line(), Table(), seeded(1)
    config = OffPolicyConfig(critic_lr=1e-2)
    learner = OffPolicy(policy, {"w": policy.w}, table, Recorded(), config, generator)
    learner.target = lambda found: found.reward
    assert np.ptp(table.values.detach().numpy()) > 2
    for _ in range(1200):
        coin = (torch.rand(256, generator=generator) < 0.5).float()
        learner.critic_step(SimpleNamespace(features={}, sample=None, executed=torch.zeros(256, 1, 1), reward=coin))
    assert np.ptp(table.values.detach().numpy()) <= 0.05
    assert float(table.values.detach().mean()) == pytest.approx(0.5, abs=0.05)


def test_the_actor_step_leaves_the_critics_unchanged():
    td3 = build()
    td3.critic_step(td3.replay.found)
    before = [(p.detach().clone(), p.grad.clone()) for p in learnt(td3.critic)]
    slow = [p.clone() for p in td3.target_critic.parameters()]
    w = td3.policy.w.detach().clone()
    td3.actor_step(td3.replay.found)
    assert all(
        torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(learnt(td3.critic), before, strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(td3.target_critic.parameters(), slow, strict=True))
    assert all(p.requires_grad for p in learnt(td3.critic)) and not torch.equal(td3.policy.w, w)


def decisions(number: int):
    return SimpleNamespace(valid=torch.ones(number, 1, 1, dtype=torch.bool))


def test_steps_follow_the_decisions_once_there_are_enough():
    """Half a step per decision from the tenth on; idle decisions do not count, and halves are not lost."""
    td3 = build()
    steps = [td3.update(decisions(number)) and td3.steps for number in (4, 5, 4, 1, 1, 0, 20)]
    assert steps == [0, 0, 2, 2, 3, 3, 13]
    idle = decisions(8)
    idle.valid[5:] = False
    assert td3.update(idle)["rollout/decisions"] == 5 and td3.steps == 15
    td3.update(decisions(1))
    assert td3.steps == 16
    empty = build(replay=Recorded(batch(0)))
    empty.update(decisions(30))
    assert empty.steps == 0 and empty.update_debt == 10.5
    empty.update(decisions(4))
    assert empty.update_debt == 2, "steps that could not be taken are not made up for at once"
    empty.replay.found = batch()
    empty.update(decisions(1))
    assert empty.steps == 2


def test_a_burst_is_taken_once_when_learning_starts():
    """Seven steps on top of the half for the tenth decision, whatever the size of the rollout that brings it."""
    td3 = build(burst=7)
    assert [td3.update(decisions(number)) and td3.steps for number in (9, 1, 1, 4)] == [0, 7, 8, 10]
    at_once = build(burst=7, learning_starts=0)
    assert at_once.update(decisions(2)) and at_once.steps == 8 and at_once.update(decisions(2)) and at_once.steps == 9


def test_the_actor_waits_for_the_warmup_and_then_steps_every_policy_delay():
    td3, moved = build(), []
    for _ in range(12):
        before = td3.policy.w.detach().clone()
        info = td3.step()
        moved.append(not torch.equal(before, td3.policy.w))
        assert moved[-1] == ("policy/loss" in info)
    assert moved == [False] * 6 + [False, True] * 3, "after the last of policy_delay critic steps"


def test_swapped_weights_are_restored_after_the_block():
    line = Line(0.5)
    with pytest.raises(ZeroDivisionError), swapped({"w": line.w}, {"w": torch.ones(2)}):
        assert line.w.tolist() == [1, 1]
        raise ZeroDivisionError
    assert line.w.tolist() == [0.5, 0.5]


def test_a_policy_without_gradient_or_too_large_a_num_min_q_is_refused():
    with pytest.raises(
        UserError, match=r"needs a policy with rsample and critic_action .* but GaussianResidual lacks them"
    ):
        build(GaussianResidual(biased_base(), StateEncoder(POINT), SMALL))
    with pytest.raises(UserError, match=r"num_min_q 5 exceeds the 4 critics.*choose 1 to 4"):
        build(num_min_q=5)


@pytest.mark.parametrize("who", ["critic", "policy"])
def test_a_nan_is_named_and_its_step_not_taken(who):
    found = batch()
    td3 = build(replay=Recorded(found), critic_warmup=0, policy_delay=1)
    td3.step(), td3.step()
    if who == "critic":
        found.reward[3] = torch.nan
    else:
        td3.actor_loss = lambda sampled: (td3.policy.rsample(sampled.features, None).action.sum() * torch.nan, {})
    module = td3.critic if who == "critic" else td3.policy
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(NonFiniteError, match=rf"the {who} gradient of .* is not finite at step 2"):
        td3.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


class Reading(Recorded):
    """One that wants to know the losses of what it gave."""

    read: torch.Tensor | None = None

    def read_losses(self, losses):
        self.read = losses


def test_a_replay_that_asks_is_told_the_loss_of_every_decision():
    replay = Reading()
    learner = build(replay=replay)
    target, value = (
        learner.target(replay.found),
        learner.critic(replay.found.features, replay.found.executed.flatten(1)),
    )
    learner.generator.set_state(seeded(5).get_state())
    learner.target = lambda batch: target
    learner.critic_step(replay.found)
    torch.testing.assert_close(replay.read, (value - target).square().mean(0).detach())
