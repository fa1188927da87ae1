"""All cameras at one size: what is predicted, and what policies see of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.world_models.small_models import SMALL, spec
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError
from world_models.canvas import Canvas, resized
from world_models.config import WorldModelConfig
from world_models.model import WorldModel


def seen(**sides: tuple[int, int, int]) -> EnvSpec:
    """An environment whose cameras have these pictures."""
    return replace(spec(), images={name: ArraySpec(shape, "uint8", 0, 255) for name, shape in sides.items()})


def pictures(shapes: dict[str, tuple[int, int, int]], count: int = 4) -> dict[str, np.ndarray]:
    chooser = np.random.default_rng(0)
    return {name: chooser.integers(0, 256, (count, *shape), np.uint8) for name, shape in shapes.items()}


def test_pictures_of_one_size_are_stacked_and_no_pixel_changes():
    shapes = {"wrist": (8, 12, 3), "front": (8, 12, 3)}
    canvas, images = Canvas.of(seen(**shapes), None, 4), pictures(shapes)
    stacked = canvas.stack(images)
    assert stacked.shape == (4, *canvas.shape) == (4, 6, 8, 12)
    assert np.array_equal(stacked[:, 3:], np.moveaxis(images["wrist"], -1, 1))
    back = canvas.split(torch.from_numpy(stacked))
    assert all(np.array_equal(back[name].numpy(), images[name]) for name in shapes)
    assert all(canvas.fit(images)[name] is images[name] for name in shapes)


def test_several_sizes_are_predicted_at_the_largest():
    shapes = {"front": (16, 16, 3), "wrist": (30, 40, 3), "grey": (20, 20, 1)}
    canvas, images = Canvas.of(seen(**shapes), None, 8), pictures(shapes)
    assert canvas.sides == (32, 40) and canvas.shape == (9, 32, 40)
    stacked = canvas.stack(images)
    assert stacked.shape == (4, 9, 32, 40)
    chosen = WorldModel(seen(**shapes), WorldModelConfig(resolution=(32, 24), backbone=SMALL))
    assert chosen.picture == (9, 32, 24) and chosen.video.latent == (9 * 16, 8, 6)
    back = canvas.split(torch.from_numpy(stacked))
    assert {name: tuple(item.shape[1:]) for name, item in back.items()} == shapes


def test_smooth_and_grey_pictures_survive_the_canvas():
    y, x = np.mgrid[0:20, 0:20] * 12
    image = np.stack([y, x, (x + y) // 2], -1).astype(np.uint8)
    assert np.abs(resized(resized(image, (40, 36)), (20, 20)).astype(int) - image).max() <= 8
    canvas = Canvas.of(seen(grey=(20, 20, 1)), (20, 20), 4)
    stacked = canvas.stack({"grey": image[None, ..., :1]})
    assert (stacked == stacked[:, :1]).all() and (stacked[0, 0] == image[..., 0]).all()
    assert np.array_equal(canvas.split(torch.from_numpy(stacked))["grey"].numpy()[0], image[..., :1])


def test_making_a_picture_smaller_averages_it():
    """Every fourth column white is a quarter grey, where the pixels around each centre would all be black."""
    stripes = np.broadcast_to((np.arange(32) % 4 == 0)[None, :, None] * np.uint8(255), (32, 32, 3)).copy()
    assert np.abs(resized(stripes, (8, 8)).astype(int) - 255 / 4)[:, 1:-1].max() < 10
    many = np.stack([stripes, 255 - stripes])[:, None]
    made = resized(torch.from_numpy(many), (24, 8))
    assert made.shape == (2, 1, 24, 8, 3) and np.array_equal(made.numpy(), resized(many, (24, 8)))


@pytest.mark.parametrize(
    "shapes, resolution, what",
    [
        ({}, None, "'table' has no camera, so there is nothing to imagine"),
        ({"depth": (16, 16, 4)}, None, "neither one nor three colours"),
        ({"front": (16, 16, 3)}, (30, 32), "pictures of 30 x 32 pixels do not divide into the model's cells of 4"),
        ({"front": (16, 16, 3)}, (0, 32), "pictures of 0 x 32 pixels do not divide"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(shapes, resolution, what):
    with pytest.raises(UserError, match=what):
        WorldModel(seen(**shapes), WorldModelConfig(resolution=resolution, backbone=SMALL))
