"""SmolVLA's network: its sizes and what it alone does; what all families keep is in ``vla/test_network.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.policies.vla.test_network import NETWORKS, Given, network
from vla_rl.contract.errors import UserError
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.network import DecoderNetwork, padded_picture

SHAPE, VLM = NETWORKS["smolvla"], "model.vlm_with_expert.vlm."
__all__ = ["network"]  # a fixture


@pytest.mark.parametrize("network", ["smolvla"], indirect=True)
def test_an_action_sees_those_before_it_alone(network: DecoderNetwork) -> None:
    given, changed = Given(), Given()
    changed.x[:, 3] += 1.0
    with torch.no_grad():
        difference = (given.velocity(network) - changed.velocity(network)).abs().amax((0, 2))
        condition = network.condition(given.prefix(network), given.state)
        first, _ = network.velocity(condition, given.x[:, : network.denoised(2)], given.t)
    assert difference[:3].max() == 0.0 and difference[3:].min() > 1e-3
    assert first.shape == (3, 2, 3) and (first - given.velocity(network)[:, :2]).abs().max() < 1e-12


def test_a_missing_camera_takes_what_is_around_its_place_alone() -> None:
    around = replace(SHAPE, picture_start=(1, 2), picture_end=(3,))
    for empty, expected in ((0, 0), (1, 1), (5, 2)):
        network, given = replace(around, empty_cameras=empty).build(), Given()
        given.pictures = [given.pictures[0], None, None]
        prefix, estimate = given.prefix(network), network.prefix_bytes(("a", None, None), 4)
        assert sum(item[0].nbytes for item in prefix.values()) == estimate
        assert prefix["mask"].shape[1] == SHAPE.picture_tokens + 3 + 3 * expected + 4


def test_the_published_sizes() -> None:
    """450 million parameters with the 47 million of the next-token head, which no action needs."""
    with torch.device("meta"):
        network = SmolVLAShape().build()
    shapes = {name: tuple(item.shape) for name, item in network.state_dict().items()}
    assert sum(item.numel() for item in network.parameters()) == 402_737_376
    assert not any(item.numel() for item in network.buffers()), (
        "a network made without memory holds nothing but its weights"
    )
    layers, text = "model.vlm_with_expert.lm_expert.layers.", f"{VLM}model.text_model."
    assert shapes[f"{text}embed_tokens.weight"] == (49280, 960) and f"{text}layers.16.mlp.up_proj.weight" not in shapes
    assert shapes[f"{layers}0.self_attn.k_proj.weight"] == (320, 720)
    assert shapes[f"{layers}1.self_attn.k_proj.weight"] == (320, 320)
    assert shapes[f"{layers}15.mlp.up_proj.weight"] == (2048, 720)
    assert shapes["model.state_proj.weight"] == (960, 32)
    assert SmolVLAShape().picture_tokens == 64


def test_a_lerobot_folder_says_the_sizes() -> None:
    assert SmolVLAShape.from_lerobot({}) == SmolVLAShape()
    assert SmolVLAShape.from_lerobot({"num_expert_layers": 0, "prefix_length": 0}) == SmolVLAShape()
    given = {"vlm_model_name": "some/other", "num_vlm_layers": 0, "expert_width_multiplier": 0.5}
    with pytest.raises(UserError, match=r"'some/other'.*vlm/config.json"):
        SmolVLAShape.from_lerobot(given)
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    shape = SmolVLAShape.from_lerobot(given, {"text_config": text, "scale_factor": 3})
    assert (shape.text.head_dim, shape.text.num_hidden_layers) == (16, 3)
    assert (shape.expert_layers, shape.expert_width) == (3, 32)
    assert shape.pixel_shuffle == 3
    with pytest.raises(UserError, match="8 expert layers do not fit"):
        SmolVLAShape.from_lerobot({"num_expert_layers": 8})


def test_pictures_are_fitted_with_black_on_the_left_and_on_top() -> None:
    white = torch.full((1, 10, 20, 3), 255, dtype=torch.uint8)
    wide, tall = padded_picture(white, (8, 8)), padded_picture(white.transpose(1, 2), (8, 8))
    assert wide.shape == (1, 3, 8, 8) and (wide[:, :, :4] == -1.0).all() and (wide[:, :, 4:] == 1.0).all()
    assert (tall[..., :4] == -1.0).all() and (tall[..., 4:] == 1.0).all()
    assert torch.equal(padded_picture(white, None), torch.ones(1, 3, 10, 20))
