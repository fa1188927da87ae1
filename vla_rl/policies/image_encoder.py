"""A small convolutional network for pixels, trained together with the policy or critic that reads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.policies.observations import IMAGE


class ImageEncoder(nn.Module):
    """Image features [B,F] of the pixels ``image/NAME`` uint8 [B,h,w,c] among a policy's features.

    Every camera has three convolutions (those of Mnih et al. 2015, with half the channels and kernels that also fit
    images of 16 pixels) and a linear layer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int, int]], width: int = 128) -> None:
        """``shapes`` (h, w, c) by camera, at least 16 pixels a side; ``width``: features of each camera."""
        super().__init__()
        self.cameras, self.size = tuple(shapes), width * len(shapes)
        self.networks = nn.ModuleList(_network(*shape, width) for shape in shapes.values())

    @classmethod
    def of(cls, spec: EnvSpec, cameras: tuple[str, ...]) -> ImageEncoder:
        """The encoder of ``cameras`` of ``spec``; raises UserError for a camera that is not there or too small."""
        for name in cameras:
            if name not in spec.images:
                raise UserError(
                    f"{spec.name!r} has no camera {name!r}, so no policy can read it; {did_you_mean(name, spec.images)}"
                )
            if min(spec.images[name].shape[:2]) < 16:
                raise UserError(
                    f"the images {name!r} of {spec.name!r} have {spec.images[name].shape[:2]} pixels, too few for "
                    "three convolutions; give images of at least 16 pixels a side."
                )
        return cls({name: _three(spec.images[name].shape) for name in cameras})

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """[...,F] for images [...,h,w,c]; F is 0 without cameras."""
        state = features["state"]
        parts = [state.new_zeros((*state.shape[:-1], 0))]
        for name, network in zip(self.cameras, self.networks, strict=True):
            image = features[IMAGE + name]
            flat = network(_pixels(image.flatten(0, -4), like=next(network.parameters())))
            parts.append(flat.unflatten(0, image.shape[:-3]))
        return torch.cat(parts, -1)


def _pixels(image: Tensor, like: Tensor) -> Tensor:
    """uint8 [B,h,w,c] as numbers within [0, 1], channels first; black is 0, so that a dark background is silent."""
    return image.permute(0, 3, 1, 2).to(like).div(255.0)


def _network(height: int, width: int, channels: int, features: int) -> nn.Sequential:
    convolutions = nn.Sequential(
        _scaled(nn.Conv2d(channels, 16, 5, 4, 2)),
        nn.ReLU(),
        _scaled(nn.Conv2d(16, 32, 3, 2, 1)),
        nn.ReLU(),
        _scaled(nn.Conv2d(32, 32, 3, 1, 1)),
        nn.ReLU(),
        nn.Flatten(),
    )
    with torch.no_grad():
        size = convolutions(torch.zeros(1, channels, height, width)).shape[1]
    return convolutions.extend([_scaled(nn.Linear(size, features)), nn.ReLU()])


def _scaled(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """``layer`` with orthogonal weights that keep the scale through ReLU, and without bias at first."""
    nn.init.orthogonal_(layer.weight, 2.0**0.5)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    height, width, channels = shape
    return height, width, channels
