"""Latent-noise policies: golden density, decoding by the base's ODE alone, exact ratios, checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from tests.latent import ToyBase
from tests.policies.test_tiny import HORIZON, SPEC, made, observations
from tests.toys import seeded
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import LikelihoodPolicy, ReparametrisedPolicy
from vla_rl.policies.feed_forward import GaussianPolicy
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.pretrained import load_policy

HEAD, N = HeadConfig(width=8, depth=1), HORIZON * SPEC.action_dim


def squashed(magnitude: float = 1.5) -> SquashedLatent:
    policy = SquashedLatent(made(), SquashedLatentConfig(HEAD, magnitude))
    torch.nn.init.normal_(policy.actor.last.weight, std=0.3, generator=seeded())
    return policy


def gaussian(dtype: torch.dtype = torch.float32) -> GaussianLatent:
    policy = GaussianLatent(made().to(dtype), LatentConfig(HEAD)).to(dtype)
    torch.nn.init.normal_(policy.actor.last.weight, std=0.3, generator=seeded())
    torch.nn.init.normal_(policy.actor.log_std, std=0.3, generator=seeded(1))
    return policy


def test_golden_density():
    """mu=0, sigma=1, u=.3, m=1.5: w=.436969 and log pi=-.875257 without log m."""
    policy = SquashedLatent(ToyBase(), SquashedLatentConfig(HEAD, 1.5))
    features = {"state": torch.zeros(1, 1)}
    w = torch.full((1, 1, 2), 1.5 * math.tanh(0.3))
    assert float(w[0, 0, 0]) == pytest.approx(0.436969, abs=1e-6)
    critic_action = policy.critic_action(features, w, torch.zeros(1, 1, 2))
    assert policy.actor.log_prob(features, critic_action).sum().item() == pytest.approx(2 * -0.875257, abs=1e-5)


def test_the_density_of_a_sample_is_that_of_the_squashed_normal():
    policy, features = squashed(), made().encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded(1))
    mean, log_std = policy.actor.distribution(features)
    law = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    choice = policy.critic_action(features, out.sample, torch.zeros_like(out.sample))
    inside = choice.abs().amax(1) < 0.99  # beyond, atanh loses what float32 has
    assert inside.sum() > 4
    expected = law.log_prob(choice.clamp(-0.999, 0.999)).sum(-1)
    torch.testing.assert_close(out.logprob[inside], expected[inside], atol=1e-3, rtol=1e-4)
    assert out.sample.abs().max() <= 1.5 and out.sample.abs().max() > 1.0
    sampled = policy.rsample(features, seeded(1))
    torch.testing.assert_close(sampled.action, choice)
    torch.testing.assert_close(sampled.logprob, out.logprob)
    assert sampled.action.requires_grad and sampled.logprob.requires_grad


@pytest.mark.parametrize("make", [squashed, gaussian])
def test_the_action_is_what_the_base_makes_of_that_noise(make):
    """The base itself, given the recorded noise, does the same; sampling draws no noise besides."""
    policy = make()
    base, features = policy.base, made().encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded(1))
    with torch.no_grad():
        flat = base.config.sampler.deterministic(base.field(features), out.sample.flatten(1))
    chunk = flat.clamp(-1, 1).unflatten(-1, (HORIZON, SPEC.action_dim))
    assert flat.abs().max() > 1  # some were clipped
    torch.testing.assert_close(out.action, policy.action_scale.unnormalize(chunk))
    torch.testing.assert_close(policy.normalized(out.action), policy.decode(features, out.sample.flatten(1)))
    low, high = policy.action_low, policy.action_high
    assert (out.action >= low).all() and (out.action <= high).all()
    assert not policy.decode(features, out.sample.flatten(1)).requires_grad


def test_the_gaussian_begins_as_the_imitation_policy():
    policy, features = GaussianLatent(made(), LatentConfig(HEAD)), made().encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded(1))
    base, _ = policy.base.act(features, {}, "eval", seeded(1))  # draws the same noise
    torch.testing.assert_close(out.action, base.action)


def test_deployed_is_the_mean_without_any_chance():
    policy, other = squashed(), gaussian()
    features = made().encode(observations())
    first, second = (policy.act(features, {}, "eval", seeded(i))[0] for i in (1, 2))
    assert torch.equal(first.action, second.action)
    torch.testing.assert_close(first.sample.flatten(1), 1.5 * torch.tanh(policy.actor.distribution(features)[0]))
    torch.testing.assert_close(other.act(features, {}, "eval", None)[0].sample.flatten(1), other.actor(features)[0])


def test_restart_is_the_prior_and_only_the_actor_is_trainable():
    policy, features = gaussian(), made().encode(observations())
    policy.restart()
    mean, std = policy.actor(features)
    assert torch.equal(mean, torch.zeros(16, N)) and torch.equal(std, torch.ones(16, N))
    own, theirs = {id(p) for p in policy.trainable().values()}, {id(p) for p in policy.base.parameters()}
    assert own == {id(p) for p in policy.parameters()} and not own & theirs


def test_checkpoints_hold_the_base_as_it_is_now(tmp_path):
    policy, features = squashed(), made().encode(observations())
    with torch.no_grad():
        policy.base.expert.velocity.bias.add_(0.2)  # as a refit does
    policy.save_pretrained(tmp_path / "best")
    restored = load_policy(tmp_path / "best", SPEC)
    assert type(restored) is type(policy) and restored.config == policy.config
    for mode in ("eval", "sample"):
        mine, theirs = (p.act(features, {}, mode, seeded(3))[0] for p in (policy, restored))
        assert torch.equal(mine.action, theirs.action) and torch.equal(mine.logprob, theirs.logprob)


def test_what_each_can_be_trained_by_and_what_neither_accepts():
    assert isinstance(squashed(), ReparametrisedPolicy) and not isinstance(squashed(), LikelihoodPolicy)
    assert isinstance(gaussian(), LikelihoodPolicy) and not isinstance(gaussian(), ReparametrisedPolicy)
    assert squashed().horizon == HORIZON
    with pytest.raises(UserError, match=r"GaussianPolicy is not a flow policy.*give a flow policy"):
        SquashedLatent(GaussianPolicy(replace(SPEC, images={})))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"magnitude is 0\.0, which has no meaning"):
        squashed(0.0)
