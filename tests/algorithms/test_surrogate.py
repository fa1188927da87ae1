"""Likelihoods in parts: a ratio per action or token, whose first gradient is that of the chunk's ratio."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.algorithms.ppo_learners import CONFIG, Watching, same, weights
from tests.token_toys import HORIZON, PARTS, SPEC, right, seeded, token_bandit, token_policy
from vla_rl.algorithms.decisions import Decisions
from vla_rl.algorithms.group_relative import GRPO, GRPOConfig, RLOOConfig
from vla_rl.algorithms.policy_gradient import clipped_objective
from vla_rl.algorithms.ppo import PPO
from vla_rl.algorithms.surrogate import executed_parts, surrogate
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy
from vla_rl.policies.statistics import RunningStatistics

FAST = {"lr": 1e-2, "lr_bounds": (1e-5, 3e-2), "target_kl": 0.2}
GRPO_CONFIG = replace(GRPOConfig(), epochs=4, minibatch=64, **FAST)
EACH = pytest.mark.parametrize("logprob_per", PARTS)
FINE = pytest.mark.parametrize("logprob_per", ["action", "token"])


def ppo(logprob_per, kind=PPO, std=0.0, **changes) -> PPO:
    policy = token_policy(logprob_per, std)
    torch.manual_seed(1)
    critic = ValueCritic({"state": 1}, width=16)
    return kind(policy, policy.trainable(), critic, replace(CONFIG, **{**FAST, **changes}), seeded())


def grpo(logprob_per, config=GRPO_CONFIG, std=0.0) -> GRPO:
    policy = token_policy(logprob_per, std)
    return config.build(policy, policy.trainable(), torch.nn.Identity(), seeded(), OneProcess())


def decisions(old, advantage, valid) -> Decisions:
    """A minibatch with log-probs ``old``, weights of 1 and nothing else."""
    one = torch.ones(len(old))
    return Decisions({}, one, {}, old, torch.tensor(advantage), one, one, torch.tensor(valid))


def clipped(ratio, advantage):
    return clipped_objective(ratio, advantage, 0.2, 0.2)


# -- the objective ----------------------------------------------------------------------------------------------------


def test_golden_token_and_chunk_ratios():
    """Two tokens, A = 1: log pi goes from (-1, -1) to (-.9, -1.2); .961951 is the mean of the tokens' objectives."""
    new, old = torch.tensor([[-0.9, -1.2]]), torch.tensor([[-1.0, -1.0]])
    loss, _ = surrogate(decisions(old, [1.0], [[True]]), new, clipped)
    assert -loss.item() == pytest.approx(2 * 0.961951, abs=2e-6)
    loss, _ = surrogate(decisions(old.sum(1), [1.0], [[True]]), new.sum(1), clipped)
    assert -loss.item() == pytest.approx(0.904837, abs=1e-6)


def test_parts_are_clipped_one_by_one_and_those_that_were_not_executed_count_nowhere():
    """Ratios 1.5 and 1.1 of the first action, 0.5 and NaN of the second, which the second decision did not execute."""
    ratio = torch.tensor([[1.5, 1.1, 0.5, 0.9], [1.5, 1.1, 0.5, math.nan]])
    new = ratio.log().requires_grad_()
    batch = decisions(torch.zeros(2, 4), [1.0, 3.0], [[True, True], [True, False]])
    loss, share = surrogate(batch, new, clipped)
    assert loss.item() == pytest.approx(-((1.2 + 1.1 + 0.5 + 0.9) + 3 * (1.2 + 1.1)) / 2)
    assert share.tolist() == [0.5, 0.5]
    loss.backward()
    expected = torch.tensor([[0.0, 1.1, 0.5, 0.9], [0.0, 3.3, 0.0, 0.0]]) / -2
    torch.testing.assert_close(new.grad, expected)


def test_which_parts_are_executed():
    valid = torch.tensor([[True, False]])
    assert executed_parts(valid, torch.zeros(1)).tolist() == [[True]]
    assert executed_parts(valid, torch.zeros(1, 2)).tolist() == [[True, False]]
    assert executed_parts(valid, torch.zeros(1, 6)).tolist() == [[True] * 3 + [False] * 3]
    with pytest.raises(ContractError, match="3 parts but a chunk 2 actions"):
        executed_parts(valid, torch.zeros(1, 3))


# -- the first gradient -----------------------------------------------------------------------------------------------


def first_gradient(learner, experience) -> list[torch.Tensor]:
    batch, _ = learner._make_batch(experience)
    new = learner.policy.log_prob(batch.features, batch.sample, batch.aux)
    return list(torch.autograd.grad(learner.policy_loss(batch, new)[0], learner.learnt.values()))


@pytest.mark.parametrize("made", [ppo, grpo, lambda *a, **k: grpo(*a, RLOOConfig(), **k)], ids=["ppo", "grpo", "rloo"])
def test_the_first_gradient_is_the_same_for_chunks_actions_and_tokens(made):
    found = []
    for logprob_per, parts in PARTS.items():
        learner = made(logprob_per, std=0.5)
        experience = token_bandit(learner.policy, 8, 4, seeded(1))
        assert experience.logprob.shape == (1, 32, *([parts] if parts > 1 else []))
        whole = replace(experience, valid=torch.ones_like(experience.valid))
        found.append(first_gradient(learner, whole))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert max(item.abs().max() for item in found[0]) > 1e-3


@FINE
def test_actions_that_were_not_executed_have_no_gradient_and_no_say(logprob_per):
    """Only the first action of every chunk is executed; what is recorded of the others may be anything."""
    learner = ppo(logprob_per, std=0.5)
    experience = token_bandit(learner.policy, 8, 4, seeded(1))
    valid = torch.zeros_like(experience.valid)
    valid[..., 0] = True
    poisoned = experience.logprob.clone()
    poisoned[..., PARTS[logprob_per] // HORIZON :] = math.nan
    experience = replace(experience, valid=valid, logprob=poisoned)
    batch, _ = learner._make_batch(experience)
    new = learner.policy.log_prob(batch.features, batch.sample, batch.aux)
    found = torch.autograd.grad(
        learner.policy_loss(batch, new)[0], [*learner.learnt.values()], retain_graph=True, allow_unused=True
    )
    first = token_policy("token", 0.5).log_prob(batch.features, batch.sample, batch.aux).logprob.unflatten(1, (3, 2))
    torch.testing.assert_close(first.sum((1, 2)), new.logprob.sum(1))
    bias = found[-1].unflatten(0, (HORIZON, -1))
    assert bias[0].abs().max() > 1e-3 and not bias[1:].any()
    executed = learner.policy.log_prob(batch.features, batch.sample, batch.aux).logprob.unflatten(1, (HORIZON, -1))
    expected = torch.autograd.grad(-(batch.advantage * executed[:, 0].sum(1)).mean(), [*learner.learnt.values()])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# -- the update -------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("minibatch", [1, 7, 64])
def test_every_parts_ratio_is_one_before_the_first_update_and_not_after(logprob_per, minibatch):
    learner = ppo(logprob_per, Watching, 0.5, minibatch=minibatch, epochs=1 if minibatch == 1 else 3)
    metrics = learner.update(token_bandit(learner.policy, 16, 4, seeded(1)))
    limit = 1e-5 * math.sqrt(PARTS["token"])
    assert learner.gaps[0] <= limit and metrics["policy/logprob_gap"] <= limit
    assert max(learner.gaps[1:]) > 1e-3 and 0 < metrics["policy/clip_fraction"] < 1


@FINE
def test_micro_batches_leave_the_gradient_as_it_is(logprob_per):
    both = [ppo(logprob_per, std=0.5, micro_batch=size, minibatch=64, epochs=1) for size in (0, 5)]
    for learner in both:
        learner.policy.double()
        learner.update(token_bandit(learner.policy, 16, 4, seeded(1)))
    for one, two in zip(*(weights(learner.policy) for learner in both), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_stale_parts_are_weighted_one_by_one():
    """log pi of two parts is -1 when acting, then -.8 and 4 at the start of the update: e^.2, and e^5 bounded to 2."""
    learner = ppo("action")
    one, old = torch.ones(2), torch.full((2, 3), -1.0)
    batch = replace(decisions(old, [2.0, 2.0], [[True] * 3] * 2), age=torch.tensor([1, 0]))
    present = Likelihood(torch.tensor([[-0.8, 4.0, -1.0], [-1.0, -1.0, -1.0]]), one, {})
    found, metrics = learner._with_proximal(batch, present, {}), {}
    torch.testing.assert_close(found.weight, torch.tensor([[math.exp(0.2), 2.0, 1.0], [1.0, 1.0, 1.0]]))
    assert torch.equal(found.logprob, present.logprob)
    learner._with_proximal(batch, present, metrics)
    assert metrics["policy/logprob_gap"] == 0 and metrics["rollout/stale"] == 0.5


def test_wrong_parts_are_refused():
    learner = ppo("token", std=0.5)
    experience = token_bandit(learner.policy, 8, 4, seeded(1))
    before = weights(learner.policy)
    with pytest.raises(ContractError, match=r"act recorded log-probs \[32\] but log_prob gives \[32, 6\]"):
        learner.update(replace(experience, logprob=experience.logprob.sum(-1)))
    with pytest.raises(ContractError, match="rounding cannot explain"):
        learner.update(replace(experience, logprob=experience.logprob + 0.1))
    assert same(before, weights(learner.policy))
    with pytest.warns(UserWarning, match="are recomputed"):
        noise = 0.02 * torch.randn(experience.logprob.shape, generator=seeded(2))
        assert learner.update(replace(experience, logprob=experience.logprob + noise))["policy/logprob_recomputed"]


# -- experience -------------------------------------------------------------------------------------------------------


@EACH
def test_parts_pass_through_windows_and_groups(logprob_per):
    env = make("gym", num_envs=4, id="CartPole-v1", time_limit=12)
    torch.manual_seed(0)
    policy = CategoricalPolicy(env.spec, RunningStatistics(4), CategoricalConfig(2, 8, 1, logprob_per=logprob_per))
    shape = () if logprob_per == "chunk" else (2,)
    rollout = RolloutSource(env, policy, 8, SeedStream(0, 10**6), seeded()).next()
    learner = PPO(policy, policy.trainable(), ValueCritic({"state": 4}, width=8), CONFIG, seeded())
    assert rollout.logprob.shape == (8, 4, *shape) and learner.update(rollout)["policy/logprob_gap"] <= 1e-5
    source = GroupConfig(groups=2, size=2, ahead=0).build(env, policy, SeedStream(0, 10**6), seeded(1))
    rollout = source.next()
    idle = ~rollout.valid.any(-1)
    assert rollout.logprob.shape == (*idle.shape, *shape) and idle.any() and not rollout.logprob[idle].any()
    learner = GRPO(policy, policy.trainable(), GRPO_CONFIG, seeded())
    metrics = learner.update(rollout)
    assert metrics["policy/logprob_gap"] <= 1e-5 and metrics["rollout/decisions"] > 0
    assert np.isfinite(metrics["policy/loss"])


# -- the optimum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "logprob_per"),
    [
        pytest.param(made, part, id=f"{made.__name__}-{part}", marks=marks)
        for made in (ppo, grpo)
        for part in PARTS
        for marks in ([] if (made, part) in ((ppo, "token"), (grpo, "action")) else [pytest.mark.full],)
    ],
)
def test_ppo_and_grpo_reach_the_optimum(made, logprob_per):
    learner, generator = made(logprob_per), seeded(1)
    assert learner.policy.spec is SPEC and right(learner.policy) < 0.7
    for _ in range(25):
        learner.update(token_bandit(learner.policy, 64, 4, generator))
    assert right(learner.policy) > 0.97
