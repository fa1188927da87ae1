"""OpenVLA's network: published names and shapes, and numbers of timm and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.policies.openvla.tiny import GOLDEN, golden_outputs, pictures, prompts, tiny, tiny_network, tiny_shape
from vla_rl.policies.openvla.decoding import Autoregressive, Parallel
from vla_rl.policies.openvla.network import DINOV2, SIGLIP, OpenVLAShape, ViTShape, openvla_pictures


def published() -> dict[str, tuple[int, ...]]:
    lines = (GOLDEN / "openvla-7b.names.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: tuple(map(int, line.split()[1:])) for line in lines}


def test_names_and_shapes_are_those_of_the_published_checkpoint():
    with torch.device("meta"):
        network = OpenVLAShape().build()
    assert {name: tuple(item.shape) for name, item in network.state_dict().items()} == published()
    assert sum(item.numel() for item in network.parameters()) == 7_541_237_184


def test_sizes_of_the_vision_transformers_are_read_from_tensors():
    assert ViTShape.of(published(), "vision_backbone.featurizer", 16) == DINOV2
    assert ViTShape.of(published(), "vision_backbone.fused_featurizer", 16) == SIGLIP
    own = {name: tuple(item.shape) for name, item in tiny_network().state_dict().items()}
    assert ViTShape.of(own, "vision_backbone.featurizer", tiny.HEADS) == tiny_shape().dino
    assert DINOV2.picture == SIGLIP.picture == 224 and tiny_shape().siglip.picture == tiny.SIDE


def test_vision_features_are_those_of_timm():
    network, expected = tiny_network(), golden_outputs()
    for camera, features in zip(pictures(), expected["features"], strict=True):
        found = network.vision_backbone(*openvla_pictures(camera, tiny.SIDE, 1.0))
        torch.testing.assert_close(found, features, rtol=0, atol=1e-5 * float(features.abs().max()))
    projected = expected["projected"]
    torch.testing.assert_close(network.patches(pictures()), projected, rtol=0, atol=1e-5 * float(projected.abs().max()))


def test_the_prefix_pads_between_pictures_and_prompt():
    network, (tokens, mask) = tiny_network(), prompts()
    prefix = network.prefix(network.patches(pictures()[:1]), tokens, mask)
    assert prefix.embeddings.shape == (3, 1 + 4 + 6, 32)
    assert prefix.mask.sum(1).tolist() == [4 + len(ids) for ids in tiny.PROMPTS] and prefix.mask[:, -1].all()
    for row, ids in enumerate(tiny.PROMPTS):
        torch.testing.assert_close(prefix.embeddings[row, -len(ids) + 1 :], network.embed(torch.tensor(ids[1:])))


def test_the_middle_of_a_picture_is_that_of_tensorflow():
    """``tf.image.crop_and_resize`` samples bilinearly at ``y_1 (h-1) + i (y_2-y_1)``: by hand on a ramp."""
    side, area = 9, 0.81  # 90 % of either side
    ramp = (torch.arange(side) * 20).to(torch.uint8).expand(1, side, side)[..., None].expand(-1, -1, -1, 3)
    _, siglip = openvla_pictures(ramp, side, area)
    at = 0.05 * (side - 1) + 0.9 * torch.arange(side)
    expected = (20 * at / 255 * 255.5).floor() / 255
    torch.testing.assert_close((siglip[0, 0, 4] + 1) / 2, expected, rtol=0, atol=1 / 255 + 1e-6)
    assert torch.equal(siglip[0, 0, 4], siglip[0, 2, 0]), "rows are alike"
    assert float(siglip[0, 0, 0, 0] + 1) / 2 * 255 == pytest.approx(8, abs=1e-4), "0.4 of a step of 20 is cut"


def test_pictures_are_resized_as_pil_does():
    seen = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(seen).resize((28, 28), Image.Resampling.BICUBIC)).astype(np.float32)
    dino, siglip = openvla_pictures(torch.from_numpy(seen)[None], 28, 1.0)
    found = (siglip[0].permute(1, 2, 0) + 1) / 2 * 255
    assert (found - torch.from_numpy(expected)).abs().max() <= 1.001
    again = (
        dino * torch.tensor([0.229, 0.224, 0.225])[:, None, None] + torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    )
    torch.testing.assert_close(again[0].permute(1, 2, 0) * 255, found)


ROWS, D = len(tiny.PROMPTS), tiny.ENTRIES


def greedy(logits, index):
    return logits.argmax(-1)


def prefixes(network, cameras, rows):
    tokens, mask = (item[rows] for item in prompts())
    return network.prefix(network.patches([item[rows] for item in pictures()[:cameras]]), tokens, mask)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_token_after_token_gives_what_transformers_gives(rows):
    network, expected = tiny_network(), golden_outputs()
    bins, logits = Autoregressive().decode(network, prefixes(network, 1, rows), (D, D), greedy)
    assert torch.equal(bins, expected["greedy"][rows])
    torch.testing.assert_close(logits, expected["autoregressive"][rows], rtol=0, atol=1e-5)
    again = Autoregressive().logits(network, prefixes(network, 1, rows), bins, D)
    torch.testing.assert_close(again, expected["autoregressive"][rows], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_all_at_once_gives_what_transformers_gives(rows):
    network, expected = tiny_network(), golden_outputs()["parallel"][rows]
    decoding = Parallel(tiny.ACTIONS)
    bins, logits = decoding.decode(network, prefixes(network, 2, rows), (D * tiny.ACTIONS, D), greedy)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(bins, expected.argmax(-1))
    executed = decoding.logits(network, prefixes(network, 2, rows), bins[:, :D], D)
    torch.testing.assert_close(executed, expected[:, :D], rtol=0, atol=1e-5)


@torch.no_grad()
def test_later_tokens_depend_on_earlier_ones_where_they_should():
    network = tiny_network()
    one, other = torch.tensor([[3, 4, 5]] * ROWS), torch.tensor([[3, 200, 5]] * ROWS)
    for decoding, changes in ((Autoregressive(), [False, False, True]), (Parallel(1), [False] * 3)):
        pair = [decoding.logits(network, prefixes(network, 1, [0, 1, 2]), bins, D) for bins in (one, other)]
        assert [bool((pair[0][:, k] != pair[1][:, k]).any()) for k in range(3)] == changes
