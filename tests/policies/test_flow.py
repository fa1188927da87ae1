"""Flow samplers: densities against independent ones, and which steps are noisy (reference/algorithms.md 1.5)."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.flow import (
    AllSteps,
    Chain,
    FlowSampler,
    LastStep,
    LastStepFromNoise,
    OneRandomStep,
    flow_matching_errors,
    gaussian_kl,
)
from vla_rl.policies.flow_schedules import (
    Field,
    FlowCps,
    FlowDdim,
    FlowNoise,
    FlowOu,
    FlowSde,
    Ode,
    bounded_log_std,
)

SCHEDULES = [FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise()]
NOISE_PLACEMENTS = [AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise()]
name = lambda value: type(value).__name__  # noqa: E731


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Network(nn.Module):
    """A field that pulls towards a tanh network's outputs within [-1, 1], with a noise head; records calls."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width + 1, 64), nn.Tanh(), nn.Linear(64, 2 * width))
        for parameter, generator in zip(self.parameters(), map(seeded, itertools.count()), strict=False):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        self.to(dtype)
        self.calls: list[int] = []

    def forward(self, x: Tensor, t: Tensor) -> Field:
        self.calls.append(x.shape[1])
        target, log_std = self.layers(torch.cat([x, t.unsqueeze(-1)], -1)).chunk(2, -1)
        return Field(x - torch.tanh(target), log_std)


def still(x: Tensor, t: Tensor) -> Field:
    """Velocity x and the raw noise-head output that means std 0.12."""
    return Field(x, torch.full_like(x, math.atanh(2 * math.log(0.12 / 0.08) / math.log(0.16 / 0.08) - 1)))


# -- densities -------------------------------------------------------------------------------------------------------


def test_worked_scalar():
    chain = Chain(torch.tensor([[[9.0], [9.0], [0.5], [0.4], [9.0]]], dtype=torch.float64), torch.tensor([[2]]))
    field = lambda x, t: Field(torch.full_like(x, 0.2))  # noqa: E731
    density = FlowSampler(FlowSde(0.5), OneRandomStep(), 4).log_prob(field, chain)
    assert density.mean.item() == pytest.approx(0.4125, abs=1e-12)
    assert density.std.item() == pytest.approx(0.25, abs=1e-12)
    assert density.logprob.item() == pytest.approx(0.466106, abs=1e-6)


def test_deterministic_is_the_ode_whatever_the_schedule():
    noise = torch.randn(100, 1, generator=seeded(), dtype=torch.float64)
    expected = noise
    for k in range(4):
        expected = expected - still(expected, torch.full((100,), 1 - k / 4, dtype=torch.float64)).velocity / 4
    for schedule in SCHEDULES:
        sampled = FlowSampler(schedule, AllSteps(), 4).deterministic(still, noise)
        torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noisy_steps", NOISE_PLACEMENTS, ids=name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_ratio_is_one_before_the_first_update(schedule, noisy_steps, dtype, bound):
    sampler, network = FlowSampler(schedule, noisy_steps, 4), Network(70, dtype)
    noise = torch.randn(64, 70, generator=seeded(), dtype=dtype)
    chain, old = sampler.sample(network, noise, seeded(1))
    terms = old.mean[0].numel()
    limit = bound * math.sqrt(terms) if dtype == torch.float32 else bound
    assert chain.points.dtype == dtype and old.logprob.dtype == torch.float64
    for size in (1, 7, 64):
        parts = [sampler.log_prob(network, chain.select(slice(i, i + size))) for i in range(0, 64, size)]
        new = torch.cat([part.logprob for part in parts])
        assert (new - old.logprob).abs().max().item() <= limit
        mean, std = torch.cat([part.mean for part in parts]), torch.cat([part.std for part in parts])
        assert gaussian_kl(old.mean, old.std, mean, std).abs().max().item() <= limit


@pytest.mark.parametrize("noisy_steps", NOISE_PLACEMENTS, ids=name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_density_is_the_sum_of_torch_normals(schedule, noisy_steps):
    """Step by step, in the Euler form of 1.2 and not in that of the code."""
    sampler, network = FlowSampler(schedule, noisy_steps, 4), Network(3, torch.float64)
    with torch.no_grad():
        chain, density = sampler.sample(network, torch.randn(20, 3, generator=seeded(), dtype=torch.float64), seeded(1))
        for b in range(20):
            logprob, entropy = 0.0, 0.0
            for k in chain.noisy_steps[b].tolist():
                x, t, s = chain.points[b, k], 1 - k / 4, 1 - (k + 1) / 4
                out = network(x[None, None], torch.tensor([[t]], dtype=torch.float64))
                v = out.velocity[0, 0]
                std = sampler.table.std[k]
                if isinstance(schedule, FlowNoise):
                    std = bounded_log_std(out.log_std[0, 0], 0.08, 0.16).exp()
                # the ODE's step, then what the sampler takes off x1_hat
                mean = x - v * (t - s) - (s - sampler.table.w1[k]) * (x + (1 - t) * v)
                normal = torch.distributions.Independent(torch.distributions.Normal(mean, std), 1)
                logprob += normal.log_prob(chain.points[b, k + 1]).item()
                entropy += normal.entropy().item()
            assert density.logprob[b].item() == pytest.approx(logprob, abs=1e-9)
            assert density.entropy[b].item() == pytest.approx(entropy, abs=1e-9)


def test_kl_equals_torch_and_the_velocity_form():
    parts = [torch.rand(5, 4, 3, generator=seeded(i), dtype=torch.float64) + 0.1 for i in range(4)]
    old, new = (torch.distributions.Normal(*parts[i : i + 2]) for i in (0, 2))
    expected = torch.distributions.kl_divergence(old, new).sum((1, 2))
    torch.testing.assert_close(gaussian_kl(*parts), expected, rtol=0, atol=1e-9)

    for k, weight in enumerate((0.125, 0.2109375, 0.6328125, 1.8984375)):
        points = torch.randn(1, 5, 2, generator=seeded(), dtype=torch.float64)
        sampler, chain = FlowSampler(FlowSde(0.5), OneRandomStep(), 4), Chain(points, torch.tensor([[k]]))
        one, two = (sampler.log_prob(lambda x, t, v=v: Field(torch.full_like(x, v)), chain) for v in (0.1, 0.3))
        divergence = gaussian_kl(one.mean, one.std, two.mean, two.std).item()
        assert divergence == pytest.approx(weight * 2 * 0.2**2, rel=1e-9)


def test_entropy_per_dimension_of_flow_noise():
    _, density = FlowSampler(FlowNoise(), AllSteps(), 4).sample(still, torch.zeros(1, 3), seeded())
    assert density.entropy.item() / 12 == pytest.approx(-0.701325, abs=1e-6)


# -- which steps are noisy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noisy_steps", [OneRandomStep(), LastStep()], ids=name)
def test_other_steps_follow_the_ode(noisy_steps):
    network = Network(3, torch.float64)
    noise = torch.randn(200, 3, generator=seeded(), dtype=torch.float64)
    chain, _ = FlowSampler(FlowSde(0.5), noisy_steps, 4).sample(network, noise, seeded(1))
    for k in range(4):
        point = chain.points[:, k]
        step = -network(point[:, None], torch.full((200, 1), 1 - k / 4, dtype=torch.float64)).velocity[:, 0] / 4
        moved = (chain.points[:, k + 1] - point - step).abs().amax(-1)
        on = (chain.noisy_steps == k).any(1)
        assert (moved[~on] < 1e-12).all() and (moved[on] > 1e-3).all()


def test_one_random_step_is_drawn_per_sample_among_noisy_steps():
    drawn = OneRandomStep().draw(FlowOu(0.5).table(4), 30_000, seeded())
    assert drawn.shape == (30_000, 1) and drawn.dtype == torch.int64
    counts = drawn.flatten().bincount(minlength=4)
    assert counts[3] == 0
    assert (counts[:3] - 10_000).abs().max() < 4 * math.sqrt(30_000 * 2 / 9)


def test_all_steps_leave_out_those_without_noise():
    sampler = FlowSampler(FlowCps(0.5), AllSteps(), 4)
    chain, density = sampler.sample(Network(3, torch.float32), torch.ones(2, 3), seeded())
    assert chain.noisy_steps.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert density.mean.shape == density.std.shape == (2, 3, 3)
    assert chain.points.shape == (2, 5, 3)


@pytest.mark.parametrize(("noisy_steps", "points"), [(AllSteps(), [4]), (OneRandomStep(), [1]), (LastStep(), [1])])
def test_likelihood_is_one_network_call(noisy_steps, points):
    network = Network(3, torch.float32)
    sampler = FlowSampler(FlowSde(0.5), noisy_steps, 4)
    chain, _ = sampler.sample(network, torch.ones(2, 3), seeded())
    network.calls.clear()
    sampler.log_prob(network, chain)
    assert network.calls == points


def test_same_generator_same_chain():
    draw = lambda: FlowSampler(FlowSde(), OneRandomStep(), 4).sample(still, torch.ones(9, 2), seeded(7))  # noqa: E731
    (one, first), (two, second) = draw(), draw()
    assert torch.equal(one.points, two.points) and torch.equal(one.noisy_steps, two.noisy_steps)
    assert torch.equal(first.logprob, second.logprob)


# -- the rest -----------------------------------------------------------------------------------------------------


def test_flow_matching_loss():
    x0, noise = torch.randn(2, 5, 3, generator=seeded())
    t = torch.rand(5, generator=seeded(1))
    calls = {}

    def field(x: Tensor, time: Tensor) -> Field:
        calls.update(x=x, t=time)
        return Field((noise - x0).unsqueeze(1) + torch.tensor([0.0, 1.0, 2.0]))

    torch.testing.assert_close(flow_matching_errors(field, x0, noise, t).mean(-1), torch.full((5,), 5 / 3))
    torch.testing.assert_close(calls["x"][:, 0], (1 - t[:, None]) * x0 + t[:, None] * noise)
    assert torch.equal(calls["t"], t[:, None])


@pytest.mark.parametrize("noisy_steps", NOISE_PLACEMENTS, ids=name)
@pytest.mark.parametrize("schedule", [*SCHEDULES, Ode()], ids=name)
def test_samplers_are_configs(schedule, noisy_steps):
    sampler = FlowSampler(schedule, noisy_steps, 4)
    assert sampler.table.steps == 4  # cached on the instance, and no field
    assert from_json(to_json(sampler)) == sampler


def test_ode_chain_has_no_density():
    sampler = FlowSampler(Ode(), AllSteps(), 4)
    chain, density = sampler.sample(still, torch.ones(3, 2), seeded())
    torch.testing.assert_close(chain.sample, sampler.deterministic(still, torch.ones(3, 2)))
    assert density.logprob.tolist() == [0, 0, 0]
    with pytest.raises(UserError, match="no density"):
        sampler.log_prob(still, chain)


def test_errors_name_the_cure():
    ones = torch.ones(3, 2)
    with pytest.raises(UserError, match="last_std"):
        FlowSampler(FlowCps(0.5), LastStep(), 4).sample(still, ones, seeded())
    with pytest.raises(UserError, match="std > 0"):
        FlowSampler(Ode(), OneRandomStep(), 4).sample(still, ones, seeded())
    with pytest.raises(ContractError, match="noise head"):
        FlowSampler(FlowNoise(), AllSteps(), 4).sample(lambda x, t: Field(x), ones, seeded())


def test_one_random_step_is_the_step_and_not_its_rank_among_the_noisy_ones():
    assert FlowOu(0.0, 0.05).table(4).noisy == (3,)
    assert (OneRandomStep().draw(FlowOu(0.0, 0.05).table(4), 50, seeded()) == 3).all()


@pytest.mark.parametrize(
    ("schedule", "halved"),
    [
        (FlowSde(1), FlowSde(0.5)),
        (FlowOu(0.5, 0.04), FlowOu(0.25, 0.02)),
        (FlowDdim(0.5, 0.04), FlowDdim(0.25, 0.02)),
        (FlowCps(0.5, 0.04), FlowCps(0.25, 0.02)),
        (FlowNoise(0.08, 0.16), FlowNoise(0.04, 0.08)),
        (Ode(), Ode()),
    ],
    ids=lambda value: repr(value),
)
def test_less_noise_is_less_of_every_kind_of_noise(schedule, halved):
    """Annealing scales all magnitudes of a schedule, also one that was given as an int."""
    sampler = FlowSampler(schedule, AllSteps(), 4)
    assert sampler.scaled(0.5) == FlowSampler(halved, AllSteps(), 4)
    assert sampler.scaled(1.0) == sampler
