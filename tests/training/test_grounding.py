"""Grounding: target weights keep the position, and a backbone learns to point at the named object."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.toys import seeded
from vla_rl.policies.image_encoder import BackboneOutput, PointingBackbone, cell_centres
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.training.fit import FitConfig, GroundingConfig, cell_weights, ground, pointing_loss

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 230)}


@pytest.mark.parametrize("side", [4, 8, 16])
def test_shares_are_bilinear_weights_whose_mean_position_is_the_target(side):
    inside = 1 - 1 / side  # outermost cell centres
    uv = (2 * torch.rand(500, 2, generator=seeded(), dtype=torch.float64) - 1) * inside
    shares = cell_weights(uv, side)
    assert shares.shape == (500, side * side) and (shares >= 0).all() and ((shares > 0).sum(1) <= 4).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(500, dtype=torch.float64))
    torch.testing.assert_close(shares @ cell_centres(side, side, like=uv), uv)


def test_targets_beyond_the_outermost_centres_go_to_the_nearest_cells():
    corners = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, -1.0]])
    shares = cell_weights(corners, 4)
    assert shares.argmax(1).tolist() == [0, 15, 3] and torch.equal(shares.sum(1), torch.ones(3))


def test_x_runs_along_columns_and_y_down_rows():
    targets = cell_centres(2, 4, like=torch.zeros(1))
    assert (
        targets[0].tolist() == [-0.75, -0.5]
        and targets[3].tolist() == [0.75, -0.5]
        and targets[4].tolist() == [-0.75, 0.5]
    )
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


def test_a_backbone_learns_to_point_at_what_is_named_and_is_then_frozen():
    torch.manual_seed(0)
    vocabulary = Vocabulary.from_texts(f"the {colour} one" for colour in COLOURS)
    policy, errors = Pointer(vocabulary), []
    other = policy.other.weight.detach().clone()
    config = GroundingConfig(fit=FitConfig(steps=150, batch=32, lr=5e-3))
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
