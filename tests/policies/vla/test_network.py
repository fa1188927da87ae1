"""Networks of flow VLAs: attention and RoPE by definition, what both families keep, bfloat16, pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.golden.vla.pi0.cases import PICTURES, SIDE, picture
from tests.policies.test_tiny import observations
from tests.policies.vla.tiny_vlas import PI0, PI05, SMOLVLA, tiny_vla
from tests.toys import seeded
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pi05.network import Pi05Network
from vla_rl.policies.pi05.policy import Pi05
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.inference import Fused
from vla_rl.policies.vla.network import (
    DecoderNetwork,
    Letterbox,
    OpenpiLetterbox,
    TransformersLetterbox,
    attended,
    bias_of,
    points_behind,
    rotated,
    rotations,
    swapped,
)
from vla_rl.policies.vla.options import TrainAll, TrainLoRA, VLAOptions

FAMILIES = [SmolVLA, Pi0, Pi05]
SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("masked", [None, "a token of a row", "all after a query"])
def test_attention_is_the_softmax_of_its_definition(masked):
    """Six heads of which three share a key each, number ``i`` with ``i // 3``."""
    query, key, value = draw(2, 6, 4, 8), draw(2, 2, 5, 8, seed=1), draw(2, 2, 5, 8, seed=2)
    seen = torch.ones(2, 1, 4, 5, dtype=torch.bool)
    if masked == "a token of a row":
        seen[1, :, :, 3] = False
    elif masked:
        seen &= torch.arange(5) <= torch.arange(4)[:, None]
    bias = None if masked is None else bias_of(seen, torch.float64, shared=3)
    found = attended(query, key, value, bias).unflatten(2, (6, 8))
    for row in range(2):
        for head in range(6):
            logits = query[row, head] @ key[row, head // 3].T / math.sqrt(8)
            weights = logits.masked_fill(~seen[row, 0], -math.inf).softmax(-1)
            torch.testing.assert_close(found[row, :, head], weights @ value[row, head // 3])


def test_rope_turns_pairs_of_halves_as_complex_numbers():
    x, positions = draw(2, 3, 2, 8), torch.tensor([[0, 1, 7], [3, 2, 5]])
    angle = positions[..., None, None] / 10_000.0 ** (torch.arange(4) / 4)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    found = rotated(x, swapped(x), rotations(positions, 8))
    torch.testing.assert_close(found, torch.cat([expected.real, expected.imag], -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_points_see_what_is_before_them_and_themselves(causal):
    mask = torch.tensor([[True, False, True]])
    found = points_behind(mask, 3, points=2, length=2, causal=causal, device=mask.device)
    later = int(not causal)
    rows = [[1, later, 0, 0], [1, 1, 0, 0], [0, 0, 1, later], [0, 0, 1, 1]]
    assert found is not None and found[0, 0].int().tolist() == [[1, 0, 1, *row] for row in rows]


@pytest.mark.parametrize("shape", [SMOLVLA, PI0], ids=["smolvla", "pi0"])
def test_without_a_mask_all_tokens_count(shape):
    torch.manual_seed(0)
    network: DecoderNetwork = shape.with_words(9).build().eval()
    for item in network.parameters():
        torch.nn.init.normal_(item, std=0.3)
    pictures = [torch.randint(0, 256, (2, 16, 16, 3), generator=seeded(), dtype=torch.uint8)]
    tokens, state = torch.tensor([[1, 2, 3], [4, 5, 6]]), draw(2, 4).float()
    x, t = draw(4, 3, 3).float(), torch.tensor([0.9, 0.5, 0.2, 0.7])
    found = []
    for mask in (None, torch.ones(2, 3, dtype=torch.bool)):
        prefix = network.encode(pictures, tokens, mask)
        condition = network.condition(prefix, state)
        velocities = [network.velocity(condition, x[:count], t[:count])[0] for count in (2, 4)]
        found.append([prefix["pooled"], *velocities])
        assert ("mask" in prefix) == (mask is not None)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_the_weights_that_lie_together(family):
    made = tiny_vla(family, VLAOptions(trains=TrainLoRA(rank=2), sampler=SDE))
    features = made.encode(observations())
    expected = made.act(features, {}, "sample", seeded(1))[0].sample
    made._acting = Fused(made.network)
    found = made.act(features, {}, "sample", seeded(1))[0].sample
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("trains", [None, TrainAll(), TrainLoRA(rank=2)], ids=["expert", "all", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_learn_compute_in_bf16_stored_in_fp32(family, trains):
    """The first ratio is 1 within .03 nats a root of terms, which is what docs/results/gpu.md saw, and a margin."""
    options = {} if trains is None else {"trains": trains}
    exact, rounded = (
        tiny_vla(family, VLAOptions(dtype=dtype, sampler=SDE, **options)) for dtype in ("float32", "bfloat16")
    )
    rounded.load_state_dict(exact.state_dict())
    features = rounded.encode(observations())
    out, _ = rounded.act(features, {}, "sample", seeded(1))
    whole, _ = exact.act(exact.encode(observations()), {}, "sample", seeded(1))
    error = (out.sample - whole.sample).square().mean().sqrt() / whole.sample.std()
    assert 1e-5 < error < 0.1
    again = rounded.log_prob({n: item[3:9] for n, item in features.items()}, out.sample[3:9], rows(out.aux, 3, 9))
    terms = out.aux["noisy_steps"].shape[1] * math.prod(rounded.latent_shape)
    assert (again.logprob - out.logprob[3:9]).abs().max() <= 0.03 * math.sqrt(terms)
    again.logprob.sum().backward()
    learnt = rounded.trainable()
    assert {item.dtype for item in learnt.values()} == {torch.float32}
    gradients = [item.grad for item in learnt.values() if item.grad is not None]
    assert {item.dtype for item in gradients} == {torch.float32} and max(item.abs().max() for item in gradients) > 0


def rows(items: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: item[start:stop] for name, item in items.items()}


# -- what a policy may rely on, of all families ----------------------------------------------------------------------

TEXT = replace(SMOLVLA.text, vocab_size=20, num_hidden_layers=4)
NETWORKS = {
    "smolvla": replace(SMOLVLA, text=TEXT, expert_layers=4, chunk=5),
    "pi0": replace(PI0, language=replace(PI0.language, vocab_size=20), chunk=5),
    "pi0.5": replace(PI05, language=replace(PI05.language, vocab_size=20), chunk=5),
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> DecoderNetwork:
    torch.manual_seed(0)
    made = NETWORKS[request.param].build().eval().double()
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

    def prefix(self, network: DecoderNetwork) -> dict[str, Tensor]:
        return network.encode(self.pictures, self.tokens, self.mask)

    def velocity(self, network: DecoderNetwork) -> Tensor:
        return network.velocity(network.condition(self.prefix(network), self.state), self.x, self.t)[0]


def test_a_row_does_not_depend_on_its_batch(network: DecoderNetwork) -> None:
    given = Given()
    with torch.no_grad():
        together, prefix = given.velocity(network), given.prefix(network)
        for index in range(3):
            alone = given.row(index)
            assert (alone.velocity(network)[0] - together[index]).abs().max() < 1e-12
            assert (alone.prefix(network)["pooled"][0] - prefix["pooled"][index]).abs().max() < 1e-6


def test_padding_of_prompts_changes_nothing(network: DecoderNetwork) -> None:
    given, longer = Given(), Given()
    longer.tokens = torch.cat((given.tokens, torch.full((3, 3), 7)), 1)
    longer.mask = torch.cat((given.mask, torch.zeros(3, 3, dtype=torch.bool)), 1)
    longer.tokens[1, 1:] = 3  # masked already
    with torch.no_grad():
        assert (given.velocity(network) - longer.velocity(network)).abs().max() < 1e-12
        assert (given.prefix(network)["pooled"] - longer.prefix(network)["pooled"]).abs().max() < 1e-6


def test_a_missing_camera_is_as_if_there_were_none(network: DecoderNetwork) -> None:
    given, missing = Given(), Given()
    missing.pictures = [given.pictures[0], None]
    given.pictures = given.pictures[:1]
    with torch.no_grad():
        assert torch.equal(given.velocity(network), missing.velocity(network))
    missing.pictures = [None, None]
    with pytest.raises(UserError, match="all cameras"):
        missing.prefix(network)


def test_points_of_a_sample_do_not_see_each_other(network: DecoderNetwork) -> None:
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


def test_everything_seen_matters(network: DecoderNetwork) -> None:
    """Each of the cameras, the order of words, the state, the noise and the time change every row's velocity.

    The state of a pi0.5 is among its words.
    """
    found, state = [], () if isinstance(network, Pi05Network) else ("state",)
    with torch.no_grad():
        for name in ("", "camera 0", "camera 1", "words", *state, "x", "t"):
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


def test_the_gradient_of_the_expert_is_the_true_one(network: DecoderNetwork) -> None:
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


def test_gradients_reach_exactly_what_requires_them(network: DecoderNetwork) -> None:
    expert = set(network.expert_parameters())
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


def test_the_bytes_of_a_prefix_are_those_that_are_told(network: DecoderNetwork) -> None:
    network = network.shape.build()  # in float32
    prefix = Given().prefix(network)
    assert sum(item.nbytes for item in prefix.values()) == 3 * network.prefix_bytes(("a", "b"), 4)
    assert all(len(item) == 3 for item in prefix.values()) and prefix["pooled"].dtype == torch.float32


def test_single_precision_is_close_to_double(network: DecoderNetwork) -> None:
    given, exact = Given(), Given().velocity(network)
    single = network.shape.build().eval()
    single.load_state_dict(network.state_dict())
    given.state, given.x = given.state.float(), given.x.float()
    velocity = given.velocity(single)
    assert velocity.dtype == torch.float32 and (velocity - exact).abs().max() < 1e-4


# -- pictures ---------------------------------------------------------------------------------------------------------

LEVEL = 1 / 127.5  # one of the 256 brightnesses


def fitted(rule: Letterbox, size: tuple[int, int]) -> np.ndarray:
    return rule(torch.from_numpy(picture(size)), SIDE).numpy()


def assert_a_level_in_few_pixels(found: np.ndarray, expected: np.ndarray) -> None:
    """Resizing rounds to 8 bits: at most one level, in less than a tenth of the pixels."""
    difference = np.abs(found - expected)
    assert difference.max() < 1.01 * LEVEL and (difference > 0.01 * LEVEL).mean() < 0.1


@pytest.mark.parametrize("size", PICTURES)
def test_transformers_makes_the_same_of_it(size):
    golden = np.load(Path(__file__).parents[2] / "golden/vla/pi0/pictures.npz")
    assert_a_level_in_few_pixels(fitted(TransformersLetterbox(), size), golden[str(size)])


@pytest.mark.parametrize("size", PICTURES)
def test_openpi_makes_the_same_of_it_with_pillow(size):
    """resize_with_pad of openpi_client: bilinear into a black square, in the middle."""
    image = pytest.importorskip("PIL.Image")
    height, width = size
    ratio = max(width / SIDE, height / SIDE)
    small = (int(width / ratio), int(height / ratio))
    square = image.new("RGB", (SIDE, SIDE), 0)
    resized = image.fromarray(picture(size)[0]).resize(small, resample=image.Resampling.BILINEAR)
    square.paste(resized, (int((SIDE - small[0]) / 2), int((SIDE - small[1]) / 2)))
    expected = np.asarray(square).transpose(2, 0, 1)[None] * LEVEL - 1.0
    assert_a_level_in_few_pixels(fitted(OpenpiLetterbox(), size), expected)


@pytest.mark.parametrize(("size", "rows"), [((20, 33), slice(6, 22)), ((72, 128), slice(6, 21))])
def test_bars_are_what_each_library_fills_them_with(size, rows):
    """A white picture, wider than high: openpi's and LeRobot's bars are black, transformers' grey."""
    white = torch.full((1, *size, 3), 255, dtype=torch.uint8)
    for rule in (Letterbox(), OpenpiLetterbox()):
        expected = torch.full((1, 3, SIDE, SIDE), -1.0)
        expected[:, :, rows] = 1.0
        torch.testing.assert_close(rule(white, SIDE), expected)
    found = TransformersLetterbox()(white, SIDE)
    assert found[0, 0, 0, 0] == pytest.approx(1.0) and found[0, 0, -1, 0] == 0.0


def test_lerobot_resizes_without_antialiasing():
    image = torch.from_numpy(picture((50, 50))).permute(0, 3, 1, 2).float()
    expected = F.interpolate(image, size=(SIDE, SIDE), mode="bilinear", align_corners=False) * LEVEL - 1.0
    torch.testing.assert_close(torch.from_numpy(fitted(Letterbox(), (50, 50))), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", [Letterbox(), OpenpiLetterbox(), TransformersLetterbox()])
def test_a_picture_of_the_right_size_stays_as_it_is(rule):
    found = fitted(rule, (SIDE, SIDE))
    expected = picture((SIDE, SIDE)).transpose(0, 3, 1, 2) * LEVEL - 1.0
    np.testing.assert_allclose(found, expected, atol=1e-6)
