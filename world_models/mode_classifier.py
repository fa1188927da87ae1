"""Which mode of the robot's next state comes true, from a picture: a crop that moves with the robot, or all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from world_models.heads import with_coordinates
from world_models.robot import ModePrediction
from world_models.types import uniform

_DROPPED = 0.2  # of the features, in training


class ModeClassifier(nn.Module):
    """Probabilities of the modes from features of the picture, which :meth:`picture_features` looks for."""

    think: nn.Linear
    leave: nn.Linear

    def forward(
        self,
        picture: Tensor,
        position: Tensor,
        state: Tensor,
        action_input: Tensor,
        prediction: ModePrediction,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Log-probabilities [B,K,S] of the modes of ``prediction``.

        ``picture`` [B,C,h,w] from -1 to 1, cameras side by side in ``C``; ``position`` [B,2 cameras] of the robot in
        them at the expected end; ``state`` [B,S]; ``action_input`` [B,A].
        A ``generator`` is given in training: it shifts what is looked at by up to a pixel and drops a fifth of the
        features.
        """
        start_and_end = torch.cat([prediction.expected_end, state], 1)
        found = self.picture_features(picture, position, start_and_end, generator)
        hidden = functional.silu(self.think(torch.cat([found, start_and_end, action_input], 1)))
        if generator is not None:
            kept = uniform(hidden.shape, generator, hidden) >= _DROPPED
            hidden = hidden * kept / (1.0 - _DROPPED)
        evidence = self.leave(hidden).float().view_as(prediction.log_probs)
        return (prediction.log_probs + evidence).log_softmax(1)

    def picture_features(
        self, picture: Tensor, position: Tensor, start_and_end: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """[B,G]: what of the picture decides, given the expected end and the present state, in ``start_and_end``."""
        raise NotImplementedError


class CropClassifier(ModeClassifier):
    """From a crop of the picture around the robot's predicted position (a prior, see ``WorldModelConfig``).

    The crop moves with the robot, so what was learnt about a grasp at one position holds at all of them.  Its centre is
    that position plus a learnt correction (a spatial transformer without scale, Jaderberg et al. 2015, arXiv
    1506.02025).
    """

    crop_grid: Tensor

    def __init__(
        self, cameras: int, sides: tuple[int, int], state: int, actions: int, modes: int, side: int = 24
    ) -> None:
        """``sides`` (h, w) of a picture; ``side`` of the crop in pixels; the others as for :class:`StateDynamics`."""
        super().__init__()
        self.cameras = cameras
        self.correction = nn.Sequential(nn.Linear(2 * state, 32), nn.SiLU(), _zero_init(nn.Linear(32, 2 * cameras)))
        self.convs = _convs(((3, 16, 1), (16, 16, 2), (16, 32, 2)))
        self.think = nn.Linear(cameras * 32 * (-(-side // 4)) ** 2 + 2 * state + actions, 128)
        self.leave = _zero_init(nn.Linear(128, modes * state))
        steps = torch.arange(side) - (side - 1) / 2
        crop_grid = torch.stack(torch.meshgrid(2 * steps / sides[1], 2 * steps / sides[0], indexing="xy"), -1)
        self.register_buffer("crop_grid", crop_grid, persistent=False)
        self.pixel = 2.0 / max(sides)

    def picture_features(
        self, picture: Tensor, position: Tensor, start_and_end: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        center = position + self.correction(start_and_end).float()
        if generator is not None:
            center = center + self.pixel * (2.0 * uniform(center.shape, generator, center) - 1.0)
        cells = picture.unflatten(1, (self.cameras, 3)).flatten(0, 1)
        grid = self.crop_grid + center.view(-1, 1, 1, 2)
        cells = functional.grid_sample(cells, grid, align_corners=False, padding_mode="border")
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        return cells.view(len(picture), -1)


class PictureClassifier(ModeClassifier):
    """From the whole picture of every camera: nothing is assumed of where robot and cameras are."""

    def __init__(self, cameras: int, sides: tuple[int, int], state: int, actions: int, modes: int) -> None:
        """As for :class:`CropClassifier`."""
        super().__init__()
        height, width = (-(-side // 8) for side in sides)
        self.convs = _convs(((3 * cameras + 2, 32, 2), (32, 32, 2), (32, 32, 2)))
        self.think = nn.Linear(32 * height * width + 2 * state + actions, 128)
        self.leave = _zero_init(nn.Linear(128, modes * state))

    def picture_features(
        self, picture: Tensor, position: Tensor, start_and_end: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        cells = with_coordinates(picture if generator is None else _shifted(picture, generator))
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        return cells.flatten(1)


def mode_classifier(
    cameras: int, sides: tuple[int, int], state: int, actions: int, modes: int, crop: int
) -> ModeClassifier:
    """From a ``crop`` of so many pixels a side, or from the whole picture where that is 0."""
    given = (cameras, sides, state, actions, modes)
    return CropClassifier(*given, crop) if crop else PictureClassifier(*given)


def _shifted(picture: Tensor, generator: torch.Generator) -> Tensor:
    """``picture`` [B,C,h,w], each by up to a pixel in both directions, its border repeated."""
    height, width = picture.shape[-2:]
    steps = (3.0 * uniform((len(picture), 2), generator, picture)).long().clamp_max(2)  # 1 is no shift
    y, x = (
        step[:, None] + torch.arange(side, device=picture.device) - 1
        for step, side in zip(steps.T, (height, width), strict=True)
    )
    rows = torch.arange(len(picture), device=picture.device)[:, None, None]
    y, x = y.clamp(0, height - 1)[:, :, None], x.clamp(0, width - 1)[:, None, :]
    return picture[rows, :, y, x].movedim(-1, 1)


def _convs(sizes: Sequence[tuple[int, int, int]]) -> nn.ModuleList:
    """Convolutions of 3 x 3: channels in and out, and stride."""
    return nn.ModuleList(nn.Conv2d(into, out, 3, stride, 1) for into, out, stride in sizes)


def _zero_init(layer: nn.Linear) -> nn.Linear:
    """``layer`` with zero weights and biases."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
