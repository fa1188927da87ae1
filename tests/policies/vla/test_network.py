"""Layers of decoders: attention and RoPE by definition, weights that lie together, and what learns in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.golden.vla.pi0.cases import PICTURES, SIDE, picture
from tests.policies.test_tiny import observations
from tests.policies.vla.tiny_vlas import PI0, SMOLVLA, tiny_vla
from tests.toys import seeded
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.pi0.policy import Pi0
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
)
from vla_rl.policies.vla.options import TrainAll, TrainLoRA, VLAOptions

FAMILIES = [SmolVLA, Pi0]
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
    found = rotated(x, rotations(positions, 8))
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
    torch.testing.assert_close(made.act(features, {}, "sample", seeded(1))[0].sample, expected, atol=1e-4, rtol=1e-4)


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
