"""The squashed Gaussian policy: its density, chunks, units, checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from tests.off_policy_toys import env_spec, seeded, squashed
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ReparametrisedPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.squashed import SquashedPolicy


@pytest.fixture
def policy() -> SquashedPolicy:
    """Chunks of three actions within [-1, 3], with weights that are not those of the start."""
    made = squashed(env_spec(low=-1.0, high=3.0), horizon=3, std=0.7)
    with torch.no_grad():
        for parameter in made.trainable().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=seeded(1)))
    return made


def features(count: int = 5) -> dict[str, torch.Tensor]:
    return {"state": torch.rand(count, 1, generator=seeded(2)), "time": torch.zeros(count, 1)}


def torch_density(policy: SquashedPolicy, given: dict[str, torch.Tensor]) -> TransformedDistribution:
    mean, log_std = policy.head.double().distribution({name: item.double() for name, item in given.items()})
    return TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])


def test_the_density_is_that_of_torch_summed_over_the_whole_chunk(policy):
    given = features()
    made = policy.double().rsample({name: item.double() for name, item in given.items()}, seeded(3))
    assert made.action.shape == (5, 6) and made.logprob.shape == (5,) and (made.action.abs() < 1).all()
    expected = torch_density(policy, given).log_prob(made.action)
    torch.testing.assert_close(made.logprob, expected, rtol=0, atol=1e-9)
    given = {name: item.double() for name, item in given.items()}
    torch.testing.assert_close(policy.log_prob_of(given, made.action).sum(-1), expected, rtol=0, atol=1e-6)


def test_a_density_far_outside_stays_finite_with_its_gradient(policy):
    bounds = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]).expand(5, -1)
    found = policy.log_prob_of(features(), bounds)
    found.sum().backward()
    assert found.isfinite().all() and all(
        p.grad.isfinite().all() for p in policy.trainable().values() if p.requires_grad
    )


def test_the_std_stays_within_its_bounds():
    policy = squashed(env_spec(low=-1.0, high=3.0), std=0.5, std_bounds=(0.4, 0.6))
    with torch.no_grad():
        policy.head.last.bias.copy_(torch.tensor([0.0, 0.0, -50.0, 50.0]))
    std = policy.head.distribution(features())[1].exp()
    torch.testing.assert_close(std, torch.tensor([0.4, 0.6]).expand(5, 2))


@pytest.mark.parametrize("std", [0.3, 0.4, 2.0])
def test_a_std_outside_its_bounds_is_refused(std):
    with pytest.raises(UserError, match="not between its bounds"):
        squashed(env_spec(), std=std, std_bounds=(0.4, 0.6))


def test_the_gradient_of_a_sample_is_that_of_its_distribution(policy):
    given, policy = {"state": torch.full((40_000, 1), 0.3)}, policy.double()
    found = policy.rsample(given, seeded(4)).action[:, 0].square().mean()
    bias = policy.head.last.bias
    (gradient,) = torch.autograd.grad(found, bias)
    mean, log_std = policy.head.distribution({"state": given["state"][:1]})
    xi = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = torch.exp(-0.5 * xi.square())
    expected = (weight / weight.sum() * torch.tanh(mean[0, 0] + log_std[0, 0].exp() * xi).square()).sum()
    (truth,) = torch.autograd.grad(expected, bias)
    assert truth[0].abs() > 0.05 and truth[6].abs() > 0.01  # mean and width of the first entry
    torch.testing.assert_close(gradient, truth, rtol=0.05, atol=2e-3)


def test_samples_are_normalised_chunks_and_actions_physical(policy):
    out, _ = policy.act(features(), {}, "sample", seeded(5))
    assert out.sample.shape == out.action.shape == (5, 3, 2)
    torch.testing.assert_close(out.action, 2.0 * out.sample + 1.0)  # [-1, 1] onto [-1, 3]
    assert out.logprob.abs().sum() > 0
    flat = policy.critic_action(features(), torch.full_like(out.sample, 9.0), out.action)
    torch.testing.assert_close(flat, out.sample.reshape(5, 6), rtol=0, atol=1e-6)
    torch.testing.assert_close(policy.log_prob_of(features(), flat).sum(-1), out.logprob, rtol=0, atol=1e-3)


def test_what_is_deployed_is_the_squashed_mean_without_noise(policy):
    out, _ = policy.act(features(), {}, "eval", seeded(6))
    other, _ = policy.act(features(), {}, "eval", seeded(7))
    mean = torch.tanh(policy.head.distribution(features())[0])
    assert torch.equal(out.sample.flatten(1), mean) and torch.equal(out.action, other.action)
    assert not out.logprob.any()


def test_it_is_what_sac_needs_and_only_its_head_learns(policy):
    assert isinstance(policy, ReparametrisedPolicy) and policy.horizon == 3
    assert policy.feature_sizes == {"state": 1}
    policy.rsample(features(), seeded()).action.sum().backward()
    assert set(map(id, policy.trainable().values())) == set(map(id, policy.parameters()))
    assert not any(p.grad is not None for p in policy.encoder.parameters())


def test_a_checkpoint_holds_encoder_statistics_and_weights(policy, tmp_path):
    policy.calibrate({"state": 3.0 + torch.randn(50, 1, generator=seeded(8))}, OneProcess())
    with torch.no_grad():
        for parameter in policy.encoder.parameters():
            parameter.add_(1.0)
    policy.save_pretrained(tmp_path / "kept")
    restored = load_policy(tmp_path / "kept", policy.spec)
    assert type(restored) is SquashedPolicy and restored.config == policy.config
    ours, theirs = (one.act(features(), {}, "sample", seeded(9))[0] for one in (policy, restored))
    assert torch.equal(ours.action, theirs.action) and torch.equal(ours.logprob, theirs.logprob)
    for mine, other in zip(policy.encoder.parameters(), restored.encoder.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("horizon", [0, 5])
def test_a_chunk_that_cannot_be_executed_is_refused(horizon):
    with pytest.raises(UserError, match=rf"chunks of 1 to 4 actions, so it cannot execute {horizon}"):
        squashed(env_spec(), horizon=horizon)
