"""Step tables against golden numbers, closed forms and a known distribution (reference/algorithms.md 1.3-1.7)."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import (
    Field,
    FlowCps,
    FlowDdim,
    FlowNoise,
    FlowOu,
    FlowSde,
    Ode,
    StepTable,
    bounded_log_std,
    time_grid,
)

MEAN, SD = 0.3, 0.4  # the 1-D data of F2 and F3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def mixture_errors(schedule, n: int = 20_000) -> tuple[float, float]:
    """Sliced W1 over 64 fixed directions, and relative error of the total variance, at K=50."""
    mixture = Mixture()
    sampler = FlowSampler(schedule, AllSteps(), 50)
    chain, _ = sampler.sample(mixture, torch.randn(n, 2, generator=seeded(3)), seeded(4))
    data = mixture.draw(n, seeded(5))
    angle = torch.arange(64) * math.pi / 64
    directions = torch.stack([angle.cos(), angle.sin()])
    gap = (chain.sample @ directions).sort(0).values - (data @ directions).sort(0).values
    return gap.abs().mean().item(), (chain.sample.var(0).sum() / data.var(0).sum()).item() - 1


@pytest.mark.parametrize(("schedule", "bound"), [(FlowSde(0.7), 0.03), (FlowOu(0.7), 0.05), (FlowDdim(0.7), 0.05)])
def test_full_chain_reaches_the_data(schedule, bound):
    """OU and DDIM keep the variance error of the ODE itself, -.03 here; Flow-SDE's noise fills it."""
    distance, variance = mixture_errors(schedule)
    assert distance <= 0.020
    assert abs(variance) <= bound


def test_full_chain_rejects_the_nearest_mistakes():
    assert min(mixture_errors(wrong)[0] for wrong in (Wrong(0.7, 0.5), Wrong(0.7, 2.0))) > 0.03


# -- the rest -----------------------------------------------------------------------------------------------------


def test_bounded_log_std():
    raw = torch.tensor([-50.0, 0.0, 50.0], dtype=torch.float64)
    expected = [0.08, math.sqrt(0.08 * 0.16), 0.16]
    assert bounded_log_std(raw, 0.08, 0.16).exp().tolist() == pytest.approx(expected, abs=1e-9)


def test_values_without_a_schedule_are_refused():
    for bad in (FlowSde(-1.0), FlowOu(0.5, -1.0), FlowDdim(1.5), FlowCps(1.1), FlowNoise(0.2, 0.1)):
        with pytest.raises(UserError):
            bad.table(4)
    with pytest.raises(UserError, match="1 or more"):
        time_grid(0)
