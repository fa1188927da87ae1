"""The supervised loop: it fits, its rate has the declared shape, its batches cover the data, it stops at a NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.toys import seeded
from vla_rl.contract.errors import NonFiniteError
from vla_rl.training.fit import FitConfig, fit, lr_factor, shuffled, weighted

TARGET = torch.tensor([[2.0, -1.0, 0.5]])


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def data(count: int = 256):
    x = torch.randn(count, 3, generator=seeded(1))
    return x, x @ TARGET.T + 0.25


def run(model, config, poison=-1, report=lambda step, info: None):
    x, y = data()
    steps = itertools.count()

    def loss(index):
        error = (model(x[index]) - y[index]).square().mean()
        return error * (float("nan") if next(steps) == poison else 1.0), {"batch": float(len(index))}

    fit(dict(model.named_parameters()), loss, shuffled(len(x), config.batch, seeded()), config, report)


def test_it_fits_and_reports_every_step():
    model, reports = linear(), []
    run(model, FitConfig(steps=300, lr=5e-2, weight_decay=0.0), report=lambda *line: reports.append(line))
    torch.testing.assert_close(model.weight, TARGET, rtol=0, atol=1e-3)
    torch.testing.assert_close(model.bias, torch.tensor([0.25]), rtol=0, atol=1e-3)
    assert [step for step, _ in reports] == list(range(300)) and all(info["batch"] == 64 for _, info in reports)
    assert reports[0][1]["loss"] > 1 and reports[-1][1]["loss"] < 1e-5


def test_weights_decay_only_when_they_should():
    ends = {}
    for decay in (0.0, 0.5):
        model = linear()
        run(model, FitConfig(steps=300, lr=5e-2, weight_decay=decay))
        ends[decay] = model.weight.norm().item()
    assert ends[0.5] < ends[0.0] - 0.02


def test_the_rate_warms_up_and_decays_to_zero():
    config = FitConfig(steps=100, warmup=10)
    rates = [lr_factor(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[4] == pytest.approx(0.5, abs=0.01)
    assert max(rates) == rates[9] > 0.95 and rates[50] == pytest.approx(0.5) and 0 < rates[99] < 1e-3
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert lr_factor(0, FitConfig(warmup=0)) == 1.0


def test_batches_are_drawn_anew_every_epoch_without_repetition():
    batches = list(itertools.islice(shuffled(10, 4, seeded()), 6))
    assert [len(batch) for batch in batches] == [4] * 6
    epochs = [torch.cat(batches[i : i + 2]).tolist() for i in (0, 2, 4)]
    assert all(len(set(epoch)) == 8 and set(epoch) <= set(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(next(shuffled(3, 64, seeded())).tolist()) == [0, 1, 2]
    repeated = itertools.islice(shuffled(10, 4, seeded()), 6)
    assert all(torch.equal(one, other) for one, other in zip(batches, repeated, strict=True))


def test_gradients_are_clipped():
    model = nn.Linear(1, 1, bias=False)
    norms = []

    def loss(_):
        return 1e6 * model.weight.sum(), {}

    config = FitConfig(steps=3, grad_norm=0.5)
    fit(
        {"w": model.weight},
        loss,
        itertools.repeat(None),
        config,
        lambda *_: norms.append(model.weight.grad.norm().item()),
    )
    assert norms == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("poison", [0, 7])
def test_a_nan_stops_before_it_enters_the_weights(poison):
    model, before = linear(), []
    keep = lambda step, info: before.append([p.detach().clone() for p in model.parameters()])  # noqa: E731
    keep(0, {})
    with pytest.raises(
        NonFiniteError, match=rf"gradient of 'weight' is not finite at step {poison}, .* step {poison - 1}"
    ):
        run(model, FitConfig(steps=50), poison, keep)
    assert len(before) == poison + 1
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before[-1], strict=True))


def test_a_sum_of_gradients_that_overflows_is_named_too():
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(NonFiniteError, match="gradient of 'all'"):
        fit({"w": weight}, lambda _: (3e38 * weight.sum(), {}), itertools.repeat(None), FitConfig(steps=1))
    assert not weight.any()


def test_training_ends_with_the_data():
    reports = []
    weight = nn.Parameter(torch.zeros(2))
    fit(
        {"w": weight},
        lambda _: (weight.sum(), {}),
        range(4),
        FitConfig(steps=9),
        lambda step, info: reports.append(step),
    )
    assert reports == [0, 1, 2, 3]


def test_weighted_batches_take_each_as_often_as_its_share():
    batches = weighted(torch.tensor([1.0, 0.0, 3.0]), 100, seeded())
    counts = sum(torch.bincount(next(batches), minlength=3) for _ in range(40)) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.25, 0.0, 0.75]), atol=0.03, rtol=0.0)
