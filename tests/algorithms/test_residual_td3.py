"""Residual TD3: targets and losses by hand, slow weights, state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sims.catalog import make
from tests.by_hand import CONFIG, Line, Recorded, batch, build, drift, learnt
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.toys import seeded
from vla_rl.algorithms.residual_td3 import ConservativeConfig, ResidualTD3
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import DeterministicResidual


def test_the_target_by_hand():
    """Target critics and policy, smoothed and clipped, the minimum of two critics, no value after a termination."""
    td3, found = build(target_noise=0.3, target_clip=0.4), batch()
    drift(td3.critic), drift(td3.policy)
    for parameter in td3.target_critic.parameters():
        nn.init.normal_(parameter, generator=seeded(1))
    target = td3.target(found)
    generator = seeded(5)
    noise = 0.3 * torch.randn(40, 2, generator=generator)
    chosen = torch.randperm(4, generator=generator)[:2]
    action = np.clip(found.next_features["state"].numpy() * 0.5 + np.clip(noise.numpy(), -0.4, 0.4), -1, 1)
    value = td3.target_critic(found.next_features, torch.from_numpy(action)).detach().numpy()[chosen.numpy()]
    expected = found.reward.numpy() + found.discount.numpy() * value.min(0)
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (found.discount == 0).any() and not target.requires_grad and float(td3.policy.w.detach()[0]) != 0.5
    assert (abs(noise) > 0.4).any() and (abs(action) == 1).any() and 0.1 < (value[0] > value[1]).mean() < 0.9


def test_the_actor_ascends_the_mean_of_critics_minus_penalty():
    td3, found = build(penalty=0.7, grad_norm=1e9), batch()
    td3.actor_step(found)
    line = Line()
    action = line.rsample(found.features, None).action
    residual_norm = action.square().sum(1).mean()
    (-td3.critic(found.features, action).mean() + 0.7 * residual_norm).backward()
    torch.testing.assert_close(td3.policy.w.grad, line.w.grad)
    assert td3.actor_step(found)["policy/residual_norm"] > 0 and "policy/residual_norm" not in build().actor_step(found)


def test_the_anchor_keeps_the_actor_near_what_was_tried():
    td3, found = build(anchor=0.7, grad_norm=1e9), batch()
    td3.actor_step(found)
    line = Line()
    action = line.rsample(found.features, None).action
    away = (action - found.executed.flatten(1).clamp(-1.0, 1.0)).square().sum(1).mean()
    (-td3.critic(found.features, action).mean() + 0.7 * away).backward()
    torch.testing.assert_close(td3.policy.w.grad, line.w.grad)


def test_target_weights_are_soft_updates_of_the_weights():
    td3 = build(tau=0.25, critic_warmup=0, policy_delay=1)
    slow, critics = td3.target_parameters["w"].clone(), [p.clone() for p in learnt(td3.target_critic)]
    td3.step()
    torch.testing.assert_close(td3.target_parameters["w"], 0.75 * slow + 0.25 * td3.policy.w.detach())
    for was, p, fast in zip(critics, learnt(td3.target_critic), learnt(td3.critic), strict=True):
        torch.testing.assert_close(p, 0.75 * was + 0.25 * fast.detach())
        assert not p.requires_grad
    assert not torch.equal(td3.target_parameters["w"], td3.policy.w)


def whole(seed: int):
    """A run on the point mass with new parts."""
    torch.manual_seed(seed)
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), SMALL)
    critic = QEnsemble(policy.feature_sizes, 2, 4, HeadConfig(16, 1))
    td3 = ResidualTD3(
        policy, policy.trainable(), critic, Replay(300, 0.9, 3), replace(CONFIG, learning_starts=40), seeded(seed)
    )
    return RolloutSource(make("point_mass", num_envs=4), policy, 9, SeedStream(1, 10**9), seeded(seed + 1)), td3


def test_inputs_are_standardised_once():
    source, td3 = whole(1)
    shown = []
    for part in (td3.critic, td3.policy):
        part.calibrate = lambda features, reducer: shown.append(set(features))
    sample = td3.replay.sample

    def with_secret(size, generator):
        found = sample(size, generator)
        both = ({**item, "privileged/mass": torch.zeros(size, 1)} for item in (found.features, found.next_features))
        return replace(found, **dict(zip(("features", "next_features"), both, strict=True)))

    td3.replay.sample = with_secret
    for _ in range(4):
        td3.update(source.next())
    assert len(shown) == 2 and "privileged/mass" in shown[0] and "privileged/mass" not in shown[1]


def test_the_conservative_penalty_by_hand():
    """Two uniform corrections and two of the actor: log-sum-exp of their values, bounded by the return, less Q."""
    td3, found = build(conservative=ConservativeConfig(0.7, 2), target_noise=0.3, target_clip=0.4), batch()
    drift(td3.critic)
    value = td3.critic(found.features, found.executed.flatten(1))
    penalty = td3.regularizer(found, value)
    generator, total = seeded(5), 0.0
    state = found.features["state"].repeat_interleave(2, 0)
    noise = (0.3 * torch.randn(80, 2, generator=generator)).clamp(-0.4, 0.4)
    own = (0.5 * state + noise).clamp(-1, 1)
    anywhere = 2 * torch.rand(80, 2, generator=generator) - 1
    for k in range(4):
        q_any, q_own = (td3.critic({"state": state}, action)[k].view(40, 2) for action in (anywhere, own))
        bounded = torch.maximum(q_own, found.returns[:, None])
        every = torch.cat([q_any, bounded], 1) + 2 * np.log(2.0)
        total += (every.exp().sum(1).log() - value[k]).mean()
    torch.testing.assert_close(penalty, 0.7 * total, rtol=1e-4, atol=1e-4)
    assert not build().regularizer(found, value).any()


def test_untried_corrections_are_worth_less_with_it():
    """Recorded ones lie within .2 of 0, and all are worth the same: far from them a critic is free to guess."""
    found = batch(200)
    found = replace(
        found, executed=0.2 * found.executed.clamp(-1, 1), discount=torch.zeros(200), reward=torch.ones(200)
    )
    gaps = []
    for conservative in (None, ConservativeConfig(0.3, 4)):
        td3 = build(replay=Recorded(found), conservative=conservative)
        for _ in range(150):
            td3.critic_step(found)
        with torch.no_grad():
            far = torch.full((200, 2), 0.9)
            near = td3.critic(found.features, found.executed.flatten(1))
            gaps.append(float((near - td3.critic(found.features, far)).mean()))
    assert gaps[1] > gaps[0] + 0.2
