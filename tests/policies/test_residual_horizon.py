"""Residuals that correct several actions of the base at once: its plan, each action's own correction, densities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.policies.test_residual import BASES, KINDS, equal, made, played, seeded
from tests.residuals import COUNTING, HORIZON, POINT, SMALL, biased_base, stepping
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import UserError
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.residual import BlendConfig, DeterministicResidual, GaussianResidual, ResidualConfig


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "horizon"), [("function", 2), ("function", 4), ("own state", 3), ("vla", 3)])
def test_at_first_it_is_the_base_after_every_kind_of_end(name, horizon, kind):
    base, _ = BASES[name]
    seeds = range(300, 312)
    corrected = made(kind, base(), replace(SMALL, horizon=horizon))
    alone, together = (played(policy, seeds, seeded(3)) for policy in (base(), corrected))
    assert sum(len(episode) % horizon > 0 for episode in alone) > 4
    for one, two in zip(alone, together, strict=True):
        equal(two, one)


def test_it_reads_the_actions_that_it_corrects_and_those_after_them():
    policy = made(config=replace(SMALL, horizon=2, plan=3))
    obs, state = make("counting", num_envs=2).reset([0, 1], [300, 301]), policy.initial_state(2)
    state = policy.reset_state(state, np.arange(2))
    for step in range(0, 16, 2):
        features, state = policy.context(policy.encode(replace(obs, time=obs.time + step)), state, seeded())
        at_call = replace(obs, time=obs.time + step - step % 4)
        chunk = policy.action_scale.normalize(torch.as_tensor(stepping(at_call)))
        behind = torch.cat([chunk[:, step % 4 + 2 :], torch.zeros(2, 3, 2)], 1)[:, :3]
        assert torch.equal(features["base_action"], chunk[:, step % 4 : step % 4 + 2].flatten(1))
        assert torch.equal(features["base_plan"], behind.flatten(1))
        assert {name: item.shape[1] for name, item in features.items() if name != "time"} == policy.feature_sizes


def test_every_action_has_a_correction_of_its_own():
    policy = made(base=biased_base(), config=replace(SMALL, horizon=HORIZON, plan=0), spec=POINT, std=5.0)
    base = torch.linspace(-0.9, 0.9, 32).view(4, 8)
    features = {"state": torch.ones(4, 2), "base_action": base, "base_plan": torch.zeros(4, 0)}
    u = policy.delta(features)
    out, _ = policy.act(features, policy.initial_state(4), "eval", seeded())
    assert out.action.shape == out.sample.shape == (4, HORIZON, 2) and u.std(1).min() > 0.1
    torch.testing.assert_close(out.action, 0.2 * (base + 0.5 * u).clamp(-1, 1).view(4, HORIZON, 2))
    found = policy.rsample(features, seeded()).action
    torch.testing.assert_close(policy.critic_action(features, out.sample, out.action), found)
    torch.testing.assert_close(base + 0.5 * found, (base + 0.5 * u).clamp(-1, 1))


def test_the_noise_of_an_action_is_that_of_the_decision_before_at_the_same_place():
    config = replace(SMALL, horizon=HORIZON, plan=0, noise=0.1, correlation=0.8)
    policy, batch = made(base=biased_base(), config=config, spec=POINT), 5_000
    zeros = torch.zeros(batch, 2 * HORIZON)
    features = {"state": zeros[:, :2], "base_action": zeros, "base_plan": zeros[:, :0]}
    state, noises, generator = policy.reset_state(policy.initial_state(batch), np.arange(batch)), [], seeded()
    for _ in range(12):
        out, state = policy.act(features, state, "sample", generator)
        noises.append(state["noise"])
    torch.testing.assert_close(out.action.flatten(1), 0.2 * noises[-1].clamp(-1, 1))
    assert float((noises[-1] * noises[-2]).mean() / 0.01) == pytest.approx(0.8, abs=0.03)
    assert abs(float((noises[-1][:, :2] * noises[-1][:, 2:4]).mean() / 0.01)) < 0.05  # within a chunk there is none


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_the_contract_and_learning_sees_the_density_of_acting(kind):
    policy = made(kind, config=replace(SMALL, horizon=2))
    assert check_policy(policy, make("counting", num_envs=3), seeded())
    if kind is DeterministicResidual:
        return
    policy = made(GaussianResidual, biased_base(), replace(SMALL, horizon=2), POINT).to(torch.float64)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    ppo = PPO(policy, policy.trainable(), critic, PPOConfig(critic_warmup=0, minibatch=7, lr=1e-3), seeded())
    rollout = RolloutSource(make("point_mass", num_envs=6), policy, 10, SeedStream(300, 10**9), seeded()).next()
    assert rollout.sample.shape[2:] == (2, 2)
    density = torch.distributions.Normal(*policy.delta(policy_inputs(rollout)))
    expected = density.log_prob(rollout.sample.flatten(2)).sum(-1)
    torch.testing.assert_close(rollout.logprob, expected, atol=1e-9, rtol=0)
    assert ppo.update(rollout)["policy/logprob_gap"] <= 1e-9


def policy_inputs(rollout) -> dict[str, torch.Tensor]:
    return {name: item[:-1] for name, item in rollout.features.items()}


def test_the_base_alone_plays_its_share_in_control_steps():
    """Up to half of a time limit in steps, whatever a decision takes of it."""
    longest = {}
    for horizon in (1, HORIZON):
        config = replace(SMALL, horizon=horizon, plan=0, blend=BlendConfig(start=1.0, per="episode", delay=0.5))
        policy = made(base=biased_base(), config=config, spec=POINT)
        zeros = torch.zeros(400, 2 * horizon)
        features = {"state": zeros[:, :2], "base_action": zeros, "base_plan": zeros[:, :0]}
        state, generator, acts = policy.reset_state(policy.initial_state(400), np.arange(400)), seeded(), []
        for _ in range(0, POINT.time_limit, horizon):
            out, state = policy.act(features, state, "sample", generator)
            acts.append(out.aux["corrected"].numpy())
        longest[horizon] = int((~np.stack(acts)).sum(0).max()) * horizon
    assert longest[1] <= 0.5 * POINT.time_limit < longest[1] + 2
    assert 0 <= longest[HORIZON] - longest[1] < HORIZON


def test_a_horizon_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"ResidualConfig.horizon"):
        ResidualConfig(horizon=-1)
    beyond = COUNTING.max_chunk + 1
    with pytest.raises(UserError, match=rf"corrects {beyond} actions at once .* at most {COUNTING.max_chunk}"):
        made(config=replace(SMALL, horizon=beyond))
    policy = made(config=replace(SMALL, horizon=3))
    with pytest.raises(UserError, match=r"FunctionPolicy chose 4 actions, .* correct 3 at a time.* divides 4"):
        played(policy, [300], seeded())


def test_a_horizon_of_0_is_the_base_s_whole_chunk():
    from tests.residuals import POINT, StateEncoder, biased_base

    base = biased_base()
    for horizon in (1, 2):
        base.horizon = horizon
        config = replace(SMALL, horizon=0, plan=0)
        assert DeterministicResidual(base, StateEncoder(POINT), config).horizon == horizon
