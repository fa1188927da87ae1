"""Policy gradients of flow samplers against the true ones (reference/algorithms.md 1.5, 1.6 F5 and F6).

F5 integrates over the noise by a scrambled Sobol sequence instead of independent samples: 2^15 points reach what would
take millions.  The true gradient goes through the sampling itself (reparameterised), on the same points.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vla_rl.policies.flow import (
    AllSteps,
    Chain,
    Field,
    FlowCps,
    FlowDdim,
    FlowNoise,
    FlowOu,
    FlowSampler,
    FlowSde,
    Gaussians,
    LastStep,
    LastStepFromNoise,
    OneRandomStep,
    StepTable,
    VelocityField,
)

N, K, HIDDEN = 2, 4, 12
LogProb = Callable[[Chain, Gaussians], Tensor]


class OneStepInTurn(OneRandomStep):
    """One noisy step per sample, enumerated in blocks instead of drawn: no sampling error.

    Blocks, because every aligned block of a Sobol sequence covers the noise evenly, while every K-th point does not.
    """

    def draw(self, table: StepTable, batch: int, generator: torch.Generator) -> Tensor:
        steps = torch.tensor(table.noisy)
        return steps[torch.arange(batch) * len(steps) // batch].unsqueeze(1)


def network(theta: Tensor) -> VelocityField:
    """A tanh network of 74 parameters, and 26 more for the noise head."""
    first, bias = theta[:36].view(N + 1, HIDDEN), theta[36:48]
    second, shift = theta[48:72].view(HIDDEN, N), theta[72:74]
    head, offset = theta[74:98].view(HIDDEN, N), theta[98:]

    def field(x: Tensor, t: Tensor) -> Field:
        hidden = torch.tanh(torch.cat([x, t.unsqueeze(-1)], -1) @ first + bias)
        return Field(hidden @ second + shift, hidden @ head + offset)

    return field


def weights(seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(100, generator=generator, dtype=torch.float64)


def reward(action: Tensor) -> Tensor:
    """Bounded and not linear, [B]."""
    return torch.sigmoid(3 * action[:, 0] - 2 * action[:, 1] ** 2)


@dataclass(frozen=True)
class Gradients:
    """``cosine`` of the score gradient with the true one, and ``norm``, the ratio of their lengths."""

    cosine: float
    norm: float


def compare(one: Tensor, other: Tensor) -> Gradients:
    return Gradients((one @ other / (one.norm() * other.norm())).item(), (one.norm() / other.norm()).item())


def gradients(
    sampler: FlowSampler,
    monkeypatch: pytest.MonkeyPatch,
    logprob: LogProb | None = None,
    seed: int = 5,
    samples: int = 2**15,
) -> tuple[Tensor, Tensor]:
    """The gradient of the expected reward by the score and by reparameterisation, each [100]."""
    sobol = torch.quasirandom.SobolEngine(N * (K + 1), scramble=True, seed=seed + 1)
    uniform = sobol.draw(samples, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    noise, *steps = torch.special.ndtri(uniform).view(-1, K + 1, N).unbind(1)
    theta = weights(seed).requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *args, **kwargs: steps.pop(0))
        chain, _ = sampler.sample(network(theta), noise, torch.Generator())
    gained = reward(chain.sample)
    (true,) = torch.autograd.grad(gained.mean(), theta)

    recorded = Chain(chain.points.detach(), chain.noisy_steps)
    density = sampler.log_prob(network(theta), recorded)
    total = density.logprob if logprob is None else logprob(recorded, density)
    baseline = reward(sampler.deterministic(network(theta), noise))  # depends on x_1 only, so it adds no bias
    advantage = (gained - baseline).detach()
    (score,) = torch.autograd.grad((advantage * total).mean(), theta)
    return score, true


def name_of(sampler: FlowSampler) -> str:
    return f"{type(sampler.schedule).__name__}-{type(sampler.placement).__name__}"


EXACT = [
    FlowSampler(FlowSde(0.5), AllSteps(), K),
    FlowSampler(FlowOu(0.5, 0.1), AllSteps(), K),
    FlowSampler(FlowDdim(0.7, 0.1), AllSteps(), K),
    FlowSampler(FlowCps(0.5, 0.1), AllSteps(), K),
    FlowSampler(FlowNoise(0.08, 0.3), AllSteps(), K),
    FlowSampler(FlowSde(0.5), LastStepFromNoise(), K),
]


@pytest.mark.parametrize("sampler", EXACT, ids=name_of)
def test_score_gradient_is_the_true_one(sampler, monkeypatch):
    found = compare(*gradients(sampler, monkeypatch))
    assert found.cosine >= 0.999
    assert found.norm == pytest.approx(1, abs=0.02)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sampler", EXACT, ids=name_of)
def test_score_gradient_is_the_true_one_for_other_networks(sampler, seed, monkeypatch):
    found = compare(*gradients(sampler, monkeypatch, seed=seed, samples=2**18))
    assert found.cosine >= 0.999
    assert found.norm == pytest.approx(1, abs=0.02)


def test_mean_over_steps_is_rejected(monkeypatch):
    """The mean over K+1 terms is the (K+1)-th root of the ratio."""
    found = compare(*gradients(EXACT[0], monkeypatch, lambda chain, density: density.logprob / (K + 1)))
    assert found.norm == pytest.approx(0.2, abs=0.01)


def test_deterministic_last_step_is_rejected(monkeypatch):
    found = compare(*gradients(FlowSampler(FlowCps(0.5), AllSteps(), K), monkeypatch))
    assert found.cosine < 0.99 and found.norm == pytest.approx(0.67, abs=0.1)


def test_executed_dimensions_only_is_rejected(monkeypatch):
    """Half of the latent is dropped from the likelihood although the network mixes it into the other half."""

    def executed(chain: Chain, density: Gaussians) -> Tensor:
        normal = torch.distributions.Normal(density.mean, density.std)
        return normal.log_prob(chain.points[:, 1:])[..., 0].sum(1)

    found = compare(*gradients(EXACT[0], monkeypatch, executed))
    assert found.cosine < 0.95


def test_one_random_step_is_a_surrogate_as_documented(monkeypatch):
    score, executed = gradients(FlowSampler(FlowSde(0.5), OneStepInTurn(), K), monkeypatch)
    all_steps, _ = gradients(FlowSampler(FlowSde(0.5), AllSteps(), K), monkeypatch)
    for true in (executed, all_steps):
        found = compare(score, true)
        assert 0.99 <= found.cosine <= 0.9999
        assert found.norm == pytest.approx(1.1 / K, rel=0.1)


def test_one_random_step_is_exactly_one_kth_for_small_noise(monkeypatch):
    """As a -> 0 it becomes 1/K of the deployed ODE's gradient."""
    score, true = gradients(FlowSampler(FlowSde(0.05), OneStepInTurn(), K), monkeypatch)
    found = compare(score, true)
    assert found.cosine >= 0.999
    assert found.norm == pytest.approx(1 / K, rel=0.02)


def test_last_step_is_a_surrogate_of_the_documented_quality(monkeypatch):
    found = compare(*gradients(FlowSampler(FlowSde(0.5), LastStep(), K), monkeypatch))
    assert 0.85 <= found.cosine <= 0.97
    assert 0.3 <= found.norm <= 0.5


# -- F6: the importance identity -----------------------------------------------------------------------------------

IMPORTANCE = [
    FlowSampler(FlowSde(0.5), AllSteps(), K),
    FlowSampler(FlowNoise(0.1, 0.3), AllSteps(), K),
    FlowSampler(FlowSde(0.5), LastStepFromNoise(), K),
]


@torch.no_grad()
def importance(sampler: FlowSampler) -> tuple[Tensor, Tensor, Tensor]:
    """log ratio and reward under the old weights, reward under the new ones, 4e5 samples each."""
    n = 400_000
    old, new = network(weights()), network(weights() + 0.03 * weights(9))
    noise = [torch.randn(n, N, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (0, 1)]
    chain, before = sampler.sample(old, noise[0], torch.Generator().manual_seed(2))
    after = sampler.log_prob(new, chain)
    fresh, _ = sampler.sample(new, noise[1], torch.Generator().manual_seed(3))
    return after.logprob - before.logprob, reward(chain.sample), reward(fresh.sample)


def within(values: Tensor, expected: float, errors: float, spread: float = 0.0) -> bool:
    standard = math.hypot(values.std().item() / math.sqrt(len(values)), spread)
    return abs(values.mean().item() - expected) <= errors * standard


@pytest.mark.full
@pytest.mark.parametrize("sampler", IMPORTANCE, ids=name_of)
def test_importance_identity(sampler):
    log_ratio, before, after = importance(sampler)
    spread = after.std().item() / math.sqrt(len(after))
    assert within(log_ratio.exp(), 1.0, 4)
    assert within(log_ratio.exp() * before, after.mean().item(), 4, spread)
    # It must separate: neither the old reward nor the root of the ratio satisfies it.
    assert not within(before, after.mean().item(), 8, spread)
    assert not within((log_ratio / (K + 1)).exp() * before, after.mean().item(), 8, spread)
