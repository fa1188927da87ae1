"""Pictures fitted into a square are those of the library whose checkpoint it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.golden.vla.pi0.cases import PICTURES, SIDE, picture
from vla_rl.policies.vla.letterbox import Letterbox, OpenpiLetterbox, TransformersLetterbox

LEVEL = 1 / 127.5  # one of the 256 brightnesses


def fitted(rule: Letterbox, size: tuple[int, int]) -> np.ndarray:
    return rule(torch.from_numpy(picture(size)), SIDE).numpy()


def assert_a_level_in_few_pixels(found: np.ndarray, expected: np.ndarray) -> None:
    """Resizing rounds to 8 bits: at most one level, in less than a tenth of the pixels."""
    difference = np.abs(found - expected)
    assert difference.max() < 1.01 * LEVEL and (difference > 0.01 * LEVEL).mean() < 0.1


@pytest.mark.parametrize("size", PICTURES)
def test_transformers_makes_the_same_of_it(size):
    golden = np.load(Path(__file__).parents[1] / "golden/vla/pi0/pictures.npz")
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
