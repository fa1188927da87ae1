"""What a policy may rely on: the seam of ``vla_rl/policies/vla/network.py``, kept by SmolVLA's network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.policies.vla.tiny_vlas import SMOLVLA
from vla_rl.contract.errors import UserError
from vla_rl.policies.smolvla.network import SmolVLANetwork
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.network import padded_picture

SHAPE = replace(SMOLVLA, text=replace(SMOLVLA.text, vocabulary=20, layers=4), expert_layers=4, chunk=5)
VLM = "model.vlm_with_expert.vlm."


@pytest.fixture(scope="module")
def network() -> SmolVLANetwork:
    torch.manual_seed(0)
    made = SHAPE.build().eval().double()
    with torch.no_grad():
        for parameter in made.parameters():  # transformers' own initialization hardly attends to anything
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.add_(torch.randn_like(parameter) / fan_in**0.5)
    return made


class Given:
    """A batch of three: two cameras, prompts of 3, 1 and 4 tokens."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.pictures: list[Tensor | None] = [
            torch.randint(0, 256, (3, *size, 3), dtype=torch.uint8, generator=draw) for size in ((16, 16), (9, 20))
        ]
        self.tokens = torch.randint(0, 20, (3, 4), generator=draw)
        self.mask = torch.arange(4) < torch.tensor([[3], [1], [4]])
        self.state, self.x = (torch.randn(shape, generator=draw).double() for shape in ((3, 4), (3, 5, 3)))
        self.t = torch.tensor([0.9, 0.5, 0.2]).double()

    def row(self, index: int) -> Given:
        one = Given()
        one.pictures = [None if item is None else item[index : index + 1] for item in self.pictures]
        for name in ("tokens", "mask", "state", "x", "t"):
            setattr(one, name, getattr(self, name)[index : index + 1])
        return one

    def prefix(self, network: SmolVLANetwork) -> dict[str, Tensor]:
        return network.encode(self.pictures, self.tokens, self.mask)

    def velocity(self, network: SmolVLANetwork) -> Tensor:
        return network.velocity(network.condition(self.prefix(network), self.state), self.x, self.t)[0]


def test_a_row_does_not_depend_on_its_batch(network: SmolVLANetwork) -> None:
    given = Given()
    with torch.no_grad():
        together, prefix = given.velocity(network), given.prefix(network)
        for index in range(3):
            alone = given.row(index)
            assert (alone.velocity(network)[0] - together[index]).abs().max() < 1e-12
            assert (alone.prefix(network)["pooled"][0] - prefix["pooled"][index]).abs().max() < 1e-6


def test_padding_of_prompts_changes_nothing(network: SmolVLANetwork) -> None:
    given, longer = Given(), Given()
    longer.tokens = torch.cat((given.tokens, torch.full((3, 3), 7)), 1)
    longer.mask = torch.cat((given.mask, torch.zeros(3, 3, dtype=torch.bool)), 1)
    longer.tokens[1, 1:] = 3  # masked already
    with torch.no_grad():
        assert (given.velocity(network) - longer.velocity(network)).abs().max() < 1e-12
        assert (given.prefix(network)["pooled"] - longer.prefix(network)["pooled"]).abs().max() < 1e-6


def test_a_missing_camera_is_as_if_there_were_none(network: SmolVLANetwork) -> None:
    given, missing = Given(), Given()
    missing.pictures = [given.pictures[0], None]
    given.pictures = given.pictures[:1]
    with torch.no_grad():
        assert torch.equal(given.velocity(network), missing.velocity(network))
    missing.pictures = [None, None]
    with pytest.raises(UserError, match="all cameras"):
        missing.prefix(network)


def test_an_action_sees_those_before_it_alone(network: SmolVLANetwork) -> None:
    given, changed = Given(), Given()
    changed.x[:, 3] += 1.0
    with torch.no_grad():
        difference = (given.velocity(network) - changed.velocity(network)).abs().amax((0, 2))
        condition = network.condition(given.prefix(network), given.state)
        first, _ = network.velocity(condition, given.x[:, : network.denoised(2)], given.t)
    assert difference[:3].max() == 0.0 and difference[3:].min() > 1e-3
    assert first.shape == (3, 2, 3) and (first - given.velocity(network)[:, :2]).abs().max() < 1e-12


def test_points_of_a_sample_do_not_see_each_other(network: SmolVLANetwork) -> None:
    """Several points of a chain at once are what they are one by one."""
    given = Given()
    x, t = torch.stack((given.x, 2.0 - given.x), 1), torch.stack((given.t, 1.0 - given.t), 1)
    with torch.no_grad():
        condition = network.condition(given.prefix(network), given.state)
        together = network.velocity(condition, x.flatten(0, 1), t.flatten())
        for index in range(2):
            alone = network.velocity(condition, x[:, index], t[:, index])
            for found, wanted in zip(together, alone, strict=True):
                assert (found.unflatten(0, (3, 2))[:, index] - wanted).abs().max() < 1e-12


def test_everything_seen_matters(network: SmolVLANetwork) -> None:
    """Each of the cameras, the order of words, the state, the noise and the time change every row's velocity."""
    found = []
    with torch.no_grad():
        for name in ("", "camera 0", "camera 1", "words", "state", "x", "t"):
            given = Given()
            if name.startswith("camera"):
                picture = given.pictures[int(name[-1])]
                assert picture is not None
                picture //= 2
            elif name == "words":
                given.tokens[:, :3], given.mask[:] = given.tokens[:, :3].flip(1), True
            elif name:
                setattr(given, name, getattr(given, name) * 0.9)
            found.append(given.velocity(network))
    for other in found[1:]:
        assert (found[0] - other).abs().amax((1, 2)).min() > 1e-4


def test_the_gradient_of_the_expert_is_the_true_one(network: SmolVLANetwork) -> None:
    """A directional derivative in float64 equals a central difference; it reaches every parameter of the expert."""
    given, expert = Given(), network.expert_parameters()
    with torch.no_grad():
        prefix = given.prefix(network)
    weights = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(2)).double()

    def loss() -> Tensor:
        return (network.velocity(network.condition(prefix, given.state), given.x, given.t)[0] * weights).sum()

    gradient = torch.autograd.grad(loss(), list(expert.values()))
    assert all(item.abs().max() > 0 for item in gradient)
    direction = [torch.randn(item.shape, generator=torch.Generator().manual_seed(3)).double() for item in gradient]
    slope = sum((item * to).sum() for item, to in zip(gradient, direction, strict=True))
    step, ends = 1e-6, []
    with torch.no_grad():
        for move in (step, -2 * step, step):
            ends.append(loss())
            for parameter, to in zip(expert.values(), direction, strict=True):
                parameter.add_(move * to)
    assert float(slope) == pytest.approx(float(ends[1] - ends[2]) / (2 * step), rel=1e-6)


def test_gradients_reach_exactly_what_requires_them(network: SmolVLANetwork) -> None:
    expert = set(network.expert_parameters())
    assert {name for name, _ in network.named_parameters() if not name.startswith(VLM)} == expert
    assert {name.split(".")[1] for name in expert if "lm_expert" not in name} == {
        "state_proj",
        "action_in_proj",
        "action_out_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    }
    network.zero_grad()
    (Given().velocity(network).square().sum() + Given().prefix(network)["pooled"].square().sum()).backward()
    reached = {name for name, item in network.named_parameters() if item.grad is not None and item.grad.any()}
    assert reached == {name for name, _ in network.named_parameters()}, "encode is differentiable too"
    network.zero_grad(set_to_none=True)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in expert)
    Given().velocity(network).sum().backward()
    assert {name for name, item in network.named_parameters() if item.grad is not None} == expert
    network.requires_grad_(True)


def test_the_bytes_of_a_prefix_are_those_that_are_told(network: SmolVLANetwork) -> None:
    prefix = Given().prefix(network)
    assert sum(item.nbytes for item in prefix.values()) == 3 * network.prefix_bytes(("a", "b"), 4)
    assert all(len(item) == 3 for item in prefix.values()) and prefix["pooled"].dtype == torch.float32


def test_a_missing_camera_takes_what_is_around_its_place_alone() -> None:
    around = replace(SHAPE, picture_start=(1, 2), picture_end=(3,))
    for empty, expected in ((0, 0), (1, 1), (5, 2)):
        network, given = replace(around, empty_cameras=empty).build(), Given()
        given.pictures = [given.pictures[0], None, None]
        prefix, estimate = given.prefix(network), network.prefix_bytes(("a", None, None), 4)
        assert sum(item[0].nbytes for item in prefix.values()) == estimate
        assert prefix["mask"].shape[1] == SHAPE.picture_tokens + 3 + 3 * expected + 4


def test_single_precision_is_close_to_double(network: SmolVLANetwork) -> None:
    given, exact = Given(), Given().velocity(network)
    single = SHAPE.build().eval()
    single.load_state_dict(network.state_dict())
    given.state, given.x = given.state.float(), given.x.float()
    velocity = given.velocity(single)
    assert velocity.dtype == torch.float32 and (velocity - exact).abs().max() < 1e-4


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
    assert (shape.text.head_size, shape.text.layers, shape.expert_layers, shape.expert_width) == (16, 3, 3, 32)
    assert shape.pixel_shuffle == 3
    with pytest.raises(UserError, match="8 expert layers do not fit"):
        SmolVLAShape.from_lerobot({"num_expert_layers": 8})


def test_pictures_are_fitted_with_black_on_the_left_and_on_top() -> None:
    white = torch.full((1, 10, 20, 3), 255, dtype=torch.uint8)
    wide, tall = padded_picture(white, (8, 8)), padded_picture(white.transpose(1, 2), (8, 8))
    assert wide.shape == (1, 3, 8, 8) and (wide[:, :, :4] == -1.0).all() and (wide[:, :, 4:] == 1.0).all()
    assert (tall[..., :4] == -1.0).all() and (tall[..., 4:] == 1.0).all()
    assert torch.equal(padded_picture(white, None), torch.ones(1, 3, 10, 20))
