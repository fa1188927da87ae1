"""The supervised loop: it fits, its rate has the declared shape, its batches cover the data, it stops at a NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.toys import FlowToy, endless, seeded
from vla_rl.contract.errors import NonFiniteError
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.image_encoder import BackboneOutput, PointingBackbone, cell_centres
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.training.fit import (
    FitConfig,
    GroundingConfig,
    ImitationConfig,
    cell_weights,
    fit,
    ground,
    imitate,
    lr_factor,
    pointing_loss,
    shuffled,
    weighted,
)

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

    note = lambda *_: norms.append(model.weight.grad.norm().item())  # noqa: E731
    fit({"w": model.weight}, loss, range(3), FitConfig(steps=9, grad_norm=0.5), note)
    assert norms == pytest.approx([0.5] * 3), "and training ends with the data"


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


def test_weighted_batches_take_each_as_often_as_its_share():
    batches = weighted(torch.tensor([1.0, 0.0, 3.0]), 100, seeded())
    counts = sum(torch.bincount(next(batches), minlength=3) for _ in range(40)) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.25, 0.0, 0.75]), atol=0.03, rtol=0.0)


# -- imitation by flow matching recovers a known conditional distribution ----------------------------------------------


def demonstrations(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N,1] and chunks [N,1,1]: N(0.8 s, 0.1^2), except that one in four goes to N(-1, 0.05^2)."""
    generator = seeded(1)
    state = 2 * torch.rand(count, 1, generator=generator) - 1
    noise, other = torch.randn(count, 1, generator=generator), torch.rand(count, 1, generator=generator) < 0.25
    return state, torch.where(other, -1 + 0.05 * noise, 0.8 * state + 0.1 * noise)[:, None]


@pytest.fixture(scope="module")
def learnt():
    torch.manual_seed(0)
    policy, losses = FlowToy(1, FlowSampler(Ode(), AllSteps(), 20)), []
    state, chunks = demonstrations(4000)
    config = ImitationConfig(fit=FitConfig(steps=800, batch=128, lr=5e-3))
    imitate(
        policy,
        endless({"state": state}, chunks),
        config,
        seeded(2),
        lambda step, info: losses.append(info["loss"]),
    )
    return policy, losses


@pytest.mark.parametrize("state", [-0.2, 0.4, 0.9])
def test_both_modes_have_their_place_share_and_width(learnt, state):
    out, _ = learnt[0].act({"state": torch.full((4000, 1), state)}, {}, "eval", seeded(3))
    sample = out.sample.flatten()
    split = (0.8 * state - 1) / 2
    other, main = sample[sample < split], sample[sample >= split]
    assert len(other) / 4000 == pytest.approx(0.25, abs=0.06)
    assert main.median().item() == pytest.approx(0.8 * state, abs=0.05)
    assert other.median().item() == pytest.approx(-1, abs=0.07)
    assert 0.05 < main.std() < 0.2


def test_the_loss_falls_to_that_of_the_distribution(learnt):
    """Not to 0: noise and data cannot be distinguished at every time."""
    losses = learnt[1]
    assert sum(losses[:5]) / 5 > 1 and 0.15 < sum(losses[-100:]) / 100 < 0.6


def test_every_chunk_is_drawn_with_several_noises_and_times():
    calls = []

    class Watching(FlowToy):
        def field(self, features):
            inner = super().field(features)

            def velocity(x, t):
                calls.append((features["state"].clone(), x.clone(), t.clone()))
                return inner(x, t)

            return velocity

    state, chunks = demonstrations(64)
    config = ImitationConfig(draws=3, fit=FitConfig(steps=2, batch=16))
    imitate(Watching(1), endless({"state": state}, chunks), config, seeded(2))
    for given, points, times in calls:
        assert len(given) == 48 and len(given.unique()) == 16  # each of the batch three times
        assert len(points.unique()) == len(times.unique()) == 48 and times.min() >= 0 and times.max() <= 1
    assert not torch.equal(calls[0][0], calls[1][0])


# -- grounding: target weights keep the position, a backbone points at the named object --------------------------------


COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 230)}


@pytest.mark.parametrize("side", [4, 8, 16])
def test_shares_are_bilinear_and_their_mean_is_the_target(side):
    inside = 1 - 1 / side  # outermost cell centres
    uv = (2 * torch.rand(500, 2, generator=seeded(), dtype=torch.float64) - 1) * inside
    shares = cell_weights(uv, side)
    assert shares.shape == (500, side * side) and (shares >= 0).all() and ((shares > 0).sum(1) <= 4).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(500, dtype=torch.float64))
    torch.testing.assert_close(shares @ cell_centres(side, side, like=uv), uv)


def test_cells_are_in_rows_and_the_nearest_has_what_is_beyond():
    corners = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, -1.0]])
    shares = cell_weights(corners, 4)
    assert shares.argmax(1).tolist() == [0, 15, 3] and torch.equal(shares.sum(1), torch.ones(3))
    assert cell_centres(2, 4, like=torch.zeros(1))[[0, 3, 4]].tolist() == [[-0.75, -0.5], [0.75, -0.5], [-0.75, 0.5]]
    assert cell_weights(torch.tensor([[0.75, -0.25]]), 4).view(4, 4)[1, 3] == 1


def test_the_loss_by_hand():
    uv = torch.tensor([[[-0.5, -0.5]]])  # the centre of the first of 2x2 cells
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [9.0, -9.0, -9.0, -9.0]]])
    found_uv = torch.tensor([[[0.0, 0.0], [-0.5, -0.5]]])
    loss, info = pointing_loss(BackboneOutput(torch.zeros(1, 1), found_uv, logits), uv)
    cross = (torch.log(torch.tensor(4.0)) + torch.log(1 + 3 * torch.exp(torch.tensor(-18.0)))) / 2
    assert loss.item() == pytest.approx(0.3 * cross.item() + 3.0 * 0.25 / 2)
    assert info["pointing_error"] == pytest.approx(0.5**0.5 / 2)


class Pointer(nn.Module):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.backbone = PointingBackbone(
            len(vocabulary.words), queries=2, width=16, value=4, max_words=vocabulary.length
        )
        self.other = nn.Linear(1, 1)

    def run_backbone(self, images: Tensor, tokens: Tensor) -> BackboneOutput:
        return self.backbone(images, tokens)


def scenes(count: int, vocabulary: Vocabulary, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """One red and one blue square each, one of which is named; where the named one is."""
    generator = seeded(seed)
    images = torch.full((count, 24, 24, 3), 120, dtype=torch.uint8)
    left = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(count)]) * 4 + 2
    top = torch.randint(0, 20, (count, 2), generator=generator)
    for i in range(count):
        for k, colour in enumerate(COLOURS.values()):
            images[i, top[i, k] : top[i, k] + 4, left[i, k] : left[i, k] + 4] = torch.tensor(colour, dtype=torch.uint8)
    named = torch.randint(0, 2, (count,), generator=generator)
    index = torch.arange(count)
    uv = torch.stack([left[index, named] + 2.0, top[index, named] + 2.0], 1) / 12 - 1
    return images, vocabulary.encode([f"the {list(COLOURS)[k]} one" for k in named]), uv[:, None]


def test_a_backbone_learns_to_point_and_is_then_frozen():
    torch.manual_seed(0)
    vocabulary = Vocabulary.from_texts(f"the {colour} one" for colour in COLOURS)
    policy, errors = Pointer(vocabulary), []
    other = policy.other.weight.detach().clone()
    config = GroundingConfig(fit=FitConfig(steps=100, batch=32, lr=5e-3))
    report = lambda step, info: errors.append(info["pointing_error"])  # noqa: E731
    images, tokens, uv = scenes(300, vocabulary, 1)
    ground(policy.backbone, images, (tokens,), uv, config, seeded(2), report)
    images, tokens, uv = scenes(100, vocabulary, 3)
    found_uv = policy.run_backbone(images, tokens).uv
    found, swapped = (found_uv - uv).norm(dim=-1), policy.run_backbone(images, tokens.roll(1, 0)).uv
    assert errors[0] > 0.4 and found.median() < 0.12
    differs = (tokens != tokens.roll(1, 0)).any(1)
    assert (swapped - uv).norm(dim=-1)[differs].median() > 0.3
    assert not policy.backbone.training and not any(p.requires_grad for p in policy.backbone.parameters())
    assert torch.equal(policy.other.weight, other)
