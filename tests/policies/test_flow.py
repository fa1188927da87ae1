"""Flow samplers: densities against independent ones, and which steps are noisy (reference/algorithms.md 1.5)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.toys import seeded
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import ContractError, UserError
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
    LastStep,
    LastStepFromNoise,
    Ode,
    OneRandomStep,
    StepTable,
    bounded_log_std,
    flow_matching_errors,
    gaussian_kl,
    time_grid,
)

SCHEDULES = [FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise()]
NOISE_PLACEMENTS = [AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise()]
name = lambda value: type(value).__name__  # noqa: E731


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


def test_kl_is_the_weighted_distance_of_velocities():
    for k, weight in enumerate((0.125, 0.2109375, 0.6328125, 1.8984375)):
        points = torch.randn(1, 5, 2, generator=seeded(), dtype=torch.float64)
        sampler, chain = FlowSampler(FlowSde(0.5), OneRandomStep(), 4), Chain(points, torch.tensor([[k]]))
        one, two = (sampler.log_prob(lambda x, t, v=v: Field(torch.full_like(x, v)), chain) for v in (0.1, 0.3))
        divergence = gaussian_kl(vars(one), vars(two)).item()
        assert divergence == pytest.approx(weight * 2 * 0.2**2, rel=1e-9)


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


def test_one_random_step_is_the_step_and_not_its_rank():
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


MEAN, SD = 0.3, 0.4  # the 1-D data of F2 and F3


def gaussian_field(x: Tensor, t: Tensor) -> Field:
    """The exact velocity for data N(MEAN, SD^2) (1.4), and the raw noise-head output that means std 0.12."""
    time = t.unsqueeze(-1)
    centred = (x - (1 - time) * MEAN) / ((1 - time) ** 2 * SD**2 + time**2)
    raw = math.atanh(2 * math.log(0.12 / 0.08) / math.log(0.16 / 0.08) - 1)
    return Field(time * centred - MEAN - (1 - time) * SD**2 * centred, torch.full_like(x, raw))


# -- F1: the golden step table -------------------------------------------------------------------------------------

GOLDEN = [
    (FlowSde(0.5), 4, (0.625, 0.375, 0.1875, -0.041667), (0.5, 0.433013, 0.25, 0.144338)),
    (FlowSde(0.5), 5, (0.675, 0.475, 0.3375, 0.158333, -0.03125), (0.5, 0.447214, 0.273861, 0.182574, 0.111803)),
    (FlowOu(0.5), 4, (0, 0.435843, 0.217921, 0), (0.75, 0.245033, 0.122516, 0)),
    (FlowDdim(0.5), 4, (0.701561, 0.471405, 0.235702, 0), (0.265165, 0.166667, 0.083333, 0)),
    (FlowCps(0.5), 4, (0.530330, 0.353553, 0.176777, 0), (0.530330, 0.353553, 0.176777, 0)),
    (Ode(), 4, (0.75, 0.5, 0.25, 0), (0, 0, 0, 0)),
    (FlowNoise(), 4, (0.75, 0.5, 0.25, 0), (1, 1, 1, 1)),  # factors of the learned std
]


@pytest.mark.parametrize(("schedule", "steps", "w1", "std"), GOLDEN)
def test_golden_step_table(schedule, steps, w1, std):
    table = schedule.table(steps)
    assert table.times == pytest.approx([1 - k / steps for k in range(steps + 1)], abs=1e-12)
    assert table.w0 == pytest.approx([(k + 1) / steps for k in range(steps)], abs=1e-12)
    assert table.w1 == pytest.approx(w1, abs=1e-6)
    assert table.std == pytest.approx(std, abs=1e-6)


@pytest.mark.parametrize("kind", [FlowOu, FlowDdim, FlowCps])
def test_last_std_changes_only_the_last_std(kind):
    plain, floored = kind(0.5).table(4), kind(0.5, last_std=0.05).table(4)
    assert replace(floored, std=plain.std) == plain
    assert floored.std == (*plain.std[:-1], 0.05)
    assert plain.noisy == (0, 1, 2) and floored.noisy == (0, 1, 2, 3)


# -- F2: the final distribution of Gaussian data at small K --------------------------------------------------------

F2 = [
    (Ode(), 4, 0.067474),
    (FlowSde(0.5), 4, 0.106064),
    (FlowSde(0.7), 4, 0.129481),
    (FlowSde(0.5), 5, 0.114101),
    (FlowOu(0.5), 4, 0.065318),
    (FlowDdim(0.5), 4, 0.066541),
    (FlowCps(0.5), 4, 0.062239),
]


@pytest.mark.parametrize(("schedule", "steps", "variance"), F2)
def test_gaussian_recursion(schedule, steps, variance):
    noise = torch.randn(20_000, 1, generator=seeded(1))
    chain, _ = FlowSampler(schedule, AllSteps(), steps).sample(gaussian_field, noise, seeded(2))
    assert chain.sample.mean().item() == pytest.approx(0.3, abs=0.01)
    assert chain.sample.var().item() == pytest.approx(variance, rel=0.05)


def test_flow_noise_adds_what_the_recursion_says():
    variance = 1.0
    for t, s in itertools.pairwise(time_grid(4)):
        total = (1 - t) ** 2 * SD**2 + t**2
        variance *= ((1 - s) * (1 - t) * SD**2 / total + s * t / total) ** 2
        variance += 0.12**2
    noise = torch.randn(20_000, 1, generator=seeded(1))
    chain, _ = FlowSampler(FlowNoise(), AllSteps(), 4).sample(gaussian_field, noise, seeded(2))
    assert chain.sample.var().item() == pytest.approx(variance, rel=0.05)


# -- F3: weak order of one step -----------------------------------------------------------------------------------


def one_step_error(table: StepTable, k: int) -> float:
    """Error of the variance after step ``k`` from the exact distribution at its start."""
    t, s = table.times[k : k + 2]
    total = (1 - t) ** 2 * SD**2 + t**2
    slope = table.w0[k] * (1 - t) * SD**2 / total + table.w1[k] * t / total
    return slope**2 * total + table.std[k] ** 2 - ((1 - s) ** 2 * SD**2 + s**2)


def error_ratios(schedule) -> list[float]:
    """Error with step .01 over error with step .005, from t = .75, .5 and .25."""
    coarse, fine = schedule.table(100), schedule.table(200)
    return [one_step_error(coarse, k) / one_step_error(fine, 2 * k) for k in (25, 50, 75)]


@pytest.mark.parametrize("schedule", [Ode(), FlowSde(0.5), FlowSde(1.0), FlowOu(0.5), FlowDdim(0.5)])
def test_one_step_is_weakly_consistent(schedule):
    assert min(error_ratios(schedule)) >= 3.5


def test_cps_is_documented_not_to_be():
    assert max(error_ratios(FlowCps(0.5))) < 1.5


@dataclass(frozen=True)
class Wrong(FlowSde):
    """Flow-SDE with its correction multiplied and its std raised to a power of the root: the tempting mistakes."""

    correction: float = 1.0
    power: float = 0.5

    def table(self, steps: int) -> StepTable:
        table = super().table(steps)
        s, delta = torch.tensor(table.times[1:]), 1.0 / steps
        w1 = s + self.correction * (torch.tensor(table.w1) - s)
        return replace(table, w1=tuple(w1.tolist()), std=tuple(d * delta ** (self.power - 0.5) for d in table.std))


WRONG = [Wrong(0.7, -1.0), Wrong(0.7, 2.0), Wrong(0.7, 0.5), Wrong(0.7, 0.0), Wrong(0.7, 1.0, 1.0)]


@pytest.mark.parametrize("schedule", WRONG)
def test_one_step_rejects_wrong_schedules(schedule):
    assert min(error_ratios(schedule)) < 2.5


# -- F4: a full chain on a mixture ---------------------------------------------------------------------------------


class Mixture:
    """The 2-D three-mode mixture of 1.6."""

    weights = torch.tensor([0.5, 0.3, 0.2])
    means = torch.tensor([[-0.6, -0.4], [0.6, -0.2], [0.1, 0.7]])

    def __init__(self) -> None:
        shapes = [(0.10, 0.20, 0.4), (0.15, 0.05, -0.7), (0.08, 0.12, 1.1)]
        turns = [torch.tensor([[math.cos(c), -math.sin(c)], [math.sin(c), math.cos(c)]]) for _, _, c in shapes]
        roots = [turn @ torch.diag(torch.tensor([a, b])) for turn, (a, b, _) in zip(turns, shapes, strict=True)]
        self.roots = torch.stack(roots)
        self.covariances = self.roots @ self.roots.mT

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        mode = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        xi = torch.randn(n, 2, generator=generator)
        return self.means[mode] + (self.roots[mode] @ xi.unsqueeze(-1)).squeeze(-1)

    def __call__(self, x: Tensor, t: Tensor) -> Field:
        time, point = float(t[0, 0]), x[:, 0]
        spread = (1 - time) ** 2 * self.covariances + time**2 * torch.eye(2)
        centred = point.unsqueeze(1) - (1 - time) * self.means
        solved = torch.einsum("jde,bje->bjd", torch.linalg.inv(spread), centred)
        log_r = self.weights.log() - 0.5 * spread.logdet() - 0.5 * (centred * solved).sum(-1)
        modes = self.means + (1 - time) * torch.einsum("jde,bje->bjd", self.covariances, solved)
        x0 = (log_r.softmax(-1).unsqueeze(-1) * modes).sum(1)
        return Field(((point - (1 - time) * x0) / time - x0).unsqueeze(1))


def mixture_errors(schedule, n: int) -> tuple[float, float]:
    """Sliced W1 over 64 fixed directions, and relative error of the total variance, at K=50."""
    mixture = Mixture()
    sampler = FlowSampler(schedule, AllSteps(), 50)
    chain, _ = sampler.sample(mixture, torch.randn(n, 2, generator=seeded(3)), seeded(4))
    data = mixture.draw(n, seeded(5))
    angle = torch.arange(64) * math.pi / 64
    directions = torch.stack([angle.cos(), angle.sin()])
    gap = (chain.sample @ directions).sort(0).values - (data @ directions).sort(0).values
    return gap.abs().mean().item(), (chain.sample.var(0).sum() / data.var(0).sum()).item() - 1


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        (FlowSde(0.7), 0.03),
        *(pytest.param(schedule, 0.05, marks=pytest.mark.full) for schedule in (FlowOu(0.7), FlowDdim(0.7))),
    ],
)
def test_full_chain_reaches_the_data(schedule, bound):
    """OU and DDIM keep the variance error of the ODE itself, -.03 here; Flow-SDE's noise fills it."""
    distance, variance = mixture_errors(schedule, 15_000)
    assert distance <= 0.020
    assert abs(variance) <= bound


def test_full_chain_rejects_the_nearest_mistakes():
    assert min(mixture_errors(wrong, 6_000)[0] for wrong in (Wrong(0.7, 0.5), Wrong(0.7, 2.0))) > 0.03


# -- the rest -----------------------------------------------------------------------------------------------------


def test_bounded_log_std():
    raw = torch.tensor([-50.0, 0.0, 50.0], dtype=torch.float64)
    expected = [0.08, math.sqrt(0.08 * 0.16), 0.16]
    assert bounded_log_std(raw, 0.08, 0.16).exp().tolist() == pytest.approx(expected, abs=1e-9)
