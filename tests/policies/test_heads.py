"""Heads on a policy's features: densities equal torch's, inputs are standardised by the data of all processes."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from tests.toys import TwoProcesses, seeded
from vla_rl.contract.batch import OneProcess
from vla_rl.policies.heads import (
    DeterministicHead,
    GaussianHead,
    HeadConfig,
    Inputs,
    SquashedHead,
    log_tanh_derivative,
)

SIZES, CONFIG = {"state": 3, "picture": 4}, HeadConfig(width=16, depth=2)


def random_features(count: int = 64) -> dict[str, torch.Tensor]:
    state, picture = torch.randn(count, 3, generator=seeded(1)), torch.randn(count, 2, 2, generator=seeded(2))
    return {"state": state.double(), "picture": picture.double(), "unread": torch.full((count, 1), torch.nan)}


def made(kind=SquashedHead, outputs: int = 2, std: float = 0.3, **options):
    torch.manual_seed(0)
    head = kind(SIZES, outputs, CONFIG, **options).double()
    torch.nn.init.normal_(head.last.weight, std=std)
    return head


def squashed(head, features) -> TransformedDistribution:
    mean, log_std = head.distribution(features)
    return TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform()])


def test_a_squashed_density_is_that_of_torch():
    head, features = made(), random_features()
    expected = squashed(head, features)
    action, logprob = head(features, seeded())
    assert action.abs().max() < 1 and action.std() > 0.1
    torch.testing.assert_close(logprob, expected.log_prob(action), rtol=1e-8, atol=1e-8)
    inside = (action.abs() < 1 - 2e-5).all(1)  # others are taken to be just within the bounds
    assert inside.sum() > 50
    torch.testing.assert_close(head.log_prob(features, action).sum(-1)[inside], logprob[inside], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(head.mode(features), torch.tanh(head.distribution(features)[0]))


def test_a_golden_squashed_density():
    """mean 0, std 1, u = .3: -.875257 (algorithms.md 4.2 without the scale)."""
    head = made(std=0.0, outputs=1)
    found = head.log_prob(random_features(1), torch.tanh(torch.tensor([[0.3]]).double()))
    assert found.flatten().tolist() == pytest.approx([-0.875257], abs=1e-6)


def test_squashed_samples_have_the_density_and_its_gradient():
    """E[log p] by samples equals the integral, and its gradient is that of the integral (reparametrisation)."""
    head, features = (
        made(outputs=1, std=0.8),
        {name: item[:1].expand(200_000, *item.shape[1:]) for name, item in random_features().items()},
    )
    _, logprob = head(features, seeded())
    logprob.mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in head.last.named_parameters()}
    head.zero_grad()
    one, grid = {name: item[:1] for name, item in features.items()}, torch.linspace(-8, 8, 20_001).double()
    mean, log_std = head.distribution(one)
    u = mean[0] + log_std.exp()[0] * grid
    density = Normal(mean[0], log_std.exp()[0]).log_prob(u)
    weight = Normal(0.0, 1.0).log_prob(grid).exp() * 16 / 20_000
    entropy = (weight * (density - log_tanh_derivative(u))).sum()
    entropy.backward()
    assert float(weight.sum()) == pytest.approx(1, abs=1e-6)
    assert float(logprob.detach().mean()) == pytest.approx(float(entropy.detach()), abs=0.02)
    for name, parameter in head.last.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0.02, atol=0.02)


def test_actions_at_the_bounds_have_a_finite_density():
    head, features = made(), random_features(2)
    assert head.log_prob(features, torch.tensor([[1.0, -1.0], [1.0, 1.0]]).double()).isfinite().all()


def test_the_slope_is_stable():
    u = torch.tensor([-300.0, -20.0, -1.0, 0.0, 0.4, 20.0, 300.0], dtype=torch.float64)
    inner = u[2:5]
    torch.testing.assert_close(log_tanh_derivative(inner), (1 - inner.tanh().square()).log())
    torch.testing.assert_close(
        log_tanh_derivative(u[[0, 1, 5, 6]]), 2 * (math.log(2) - u[[0, 1, 5, 6]].abs()), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("std", [0.05, 1.0, 3.0])
def test_the_initial_action_is_the_same_in_every_state(std):
    features = random_features()
    torch.manual_seed(0)
    squash = SquashedHead(SIZES, 2, CONFIG, std).double()
    mean, log_std = squash.distribution(features)
    assert not mean.any()
    torch.testing.assert_close(log_std.exp(), torch.full_like(mean, std))
    assert not DeterministicHead(SIZES, 2, CONFIG).double()(features).any()
    mean, deviation = GaussianHead(SIZES, 2, CONFIG, std).double()(features)
    assert not mean.any()
    torch.testing.assert_close(deviation, torch.full_like(mean, std), rtol=1e-6, atol=0)


def test_a_deterministic_choice_is_within_one():
    out = made(DeterministicHead, std=50.0)(random_features())
    assert out.abs().max() <= 1 and out.abs().min() < 1 and out.min() < -0.9 < 0.9 < out.max()


def test_inputs_are_standardised_whoever_has_the_data():
    """Several axes in front, entries flattened in order; a constant one is not blown up."""
    features = {"state": 3 + 2 * torch.randn(6, 5, 3, generator=seeded()), "picture": torch.ones(6, 5, 2, 2)}
    one, two = Inputs(SIZES), Inputs(SIZES)
    one.calibrate(features, OneProcess())
    raw = torch.cat([features["state"], features["picture"].flatten(2)], -1)
    torch.testing.assert_close(one.mean, raw.reshape(-1, 7).mean(0))
    torch.testing.assert_close(one.std[:3], raw.reshape(-1, 7).std(0)[:3])
    assert one.std[3:].tolist() == pytest.approx([1e-2] * 4)
    torch.testing.assert_close(one(features), (raw - one.mean) / one.std)

    first, second = TwoProcesses.pair()
    other = Inputs(SIZES)
    halves = [{name: item[part] for name, item in features.items()} for part in (slice(0, 2), slice(2, 6))]
    thread = threading.Thread(target=other.calibrate, args=(halves[1], second))
    thread.start()
    two.calibrate(halves[0], first)
    thread.join()
    for name in ("mean", "std"):
        torch.testing.assert_close(getattr(two, name), getattr(one, name))
        assert torch.equal(getattr(two, name), getattr(other, name))


def test_statistics_go_where_weights_go_and_take_no_gradient():
    one, two, features = made(), made(), random_features()
    one.trunk.inputs.calibrate(features, OneProcess())
    assert not torch.equal(one.mode(features), two.mode(features))
    with torch.no_grad():
        for name, parameter in two.named_parameters():
            parameter.copy_(dict(one.named_parameters())[name])
    assert torch.equal(one.mode(features), two.mode(features))
    one.mode(features).sum().backward()
    assert one.trunk.inputs.mean.grad is None and one.trunk.inputs.std.grad is None
