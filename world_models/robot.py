"""The robot in a world model: its next states, which of them comes true, and where it is in the pictures.

The future is often bimodal: the fingers stop at an object or close fully.  A single prediction would be the mean of the
two, which never happens and which the next call could not continue from.  So the prediction is a mixture of modes (a
mixture density network, Bishop 1994), for each entry of the state by itself: what stops a hand is not what stops its
fingers, and joint modes of all entries would be all pairs of the two.

``StateDynamics`` predicts the modes from state and actions alone, ``ModeClassifier`` their probabilities from the
picture.  One network for both hardly learns the probabilities: the gradient of a mode's value is larger than that of
its probability by the inverse of the standard deviation, squared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from world_models.backbones import zero_init
from world_models.heads import with_coordinates
from world_models.types import uniform

# Chooses among modes [B,K,F,S] with log-probabilities [B,K,S], given standard normal noise [B,S]: int64 [B,S].
ModeSelector: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class StateDynamics(nn.Module):
    """Modes of the robot's next states, from state and actions alone."""

    def __init__(self, state: int, actions: int, frames: int, modes: int, width: int = 256) -> None:
        """``state`` S; ``actions``: entries A of the action input; ``frames`` F; ``modes`` K."""
        super().__init__()
        self.shape = (modes, frames + 1, state)
        sizes = [state + actions, width, width, width]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        self.think = nn.Sequential(*layers, nn.Linear(width, math.prod(self.shape)))
        self.straight = nn.Linear(state + actions, frames * state)  # most of it is linear

    def forward(self, state: Tensor, action_input: Tensor) -> tuple[Tensor, Tensor]:
        """Modes [B,K,F,S] and their log-probabilities [B,K,S], from ``state`` [B,S] and ``action_input`` [B,A]."""
        known = torch.cat([state, action_input], 1)
        linear = state[:, None] + self.straight(known).unflatten(1, (-1, state.shape[1]))
        out = self.think(known).unflatten(1, self.shape)
        return linear[:, None] + out[:, :, 1:], out[:, :, 0].log_softmax(1)


@dataclass(frozen=True)
class ModePrediction:
    """The output of :class:`StateDynamics`.

    modes         [B,K,F,S]
    log_probs     [B,K,S]
    expected_end  [B,S]      the mean over the modes of the state after the last known action
    """

    modes: Tensor
    log_probs: Tensor
    expected_end: Tensor

    @classmethod
    def of(cls, modes: Tensor, log_probs: Tensor, known: Tensor) -> ModePrediction:
        """With ``known`` [B] actions, 1 to F."""
        ends = modes[torch.arange(len(known), device=known.device), :, known - 1]
        return cls(modes, log_probs, (log_probs.exp() * ends).sum(1))


def sample_modes(modes: Tensor, log_probs: Tensor, noise: Tensor) -> Tensor:
    """int64 [B,S]: a mode for each entry, drawn with probabilities ``exp(log_probs)`` [B,K,S]; a ``ModeSelector``."""
    share = torch.special.ndtr(noise)[:, None]
    return (log_probs.exp().cumsum(1) < share).sum(1).clamp_max(log_probs.shape[1] - 1)


def select_modes(modes: Tensor, choice: Tensor) -> Tensor:
    """[B,F,S]: the states of the modes ``choice`` int64 [B,S] among ``modes`` [B,K,F,S]."""
    index = choice[:, None, None].expand(-1, 1, modes.shape[2], -1)
    return modes.gather(1, index)[:, 0]


def mixture_nll(modes: Tensor, log_probs: Tensor, target: Tensor, counts: Tensor, spread: float = 0.1) -> Tensor:
    """[B]: negative log-likelihood, per entry, of ``target`` [B,F,S] under Gaussians around ``modes`` [B,K,F,S].

    All have the standard deviation ``spread``, so the nearest mode gets most of the gradient; ``counts`` [B,F] is 1 for
    control steps with a known action.
    """
    off = ((modes - target[:, None]) / spread).square() * counts[:, None, :, None]
    return -(log_probs - 0.5 * off.sum(2)).logsumexp(1).sum(1) / math.prod(target.shape[1:])


def training_nll(modes: Tensor, log_probs: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """[B]: :func:`mixture_nll`, and a tenth of it with a ten times larger standard deviation.

    A mode far from all data gets no gradient of the first term, and another mode would average two outcomes; the
    second term brings it back.
    """
    near = mixture_nll(modes, log_probs, target, counts)
    return near + 0.1 * mixture_nll(modes, log_probs, target, counts, spread=1.0)


def disagreement(modes: Tensor, log_probs: Tensor) -> Tensor:
    """[B]: root mean square distance of ``modes`` [B,K,S] from their mean, weighted by ``log_probs`` [B,K,S]."""
    share = log_probs.exp()
    apart = modes - (share * modes).sum(1, keepdim=True)
    return (share * apart.square()).sum(1).mean(-1).sqrt()


# -- which mode comes true, from a picture -----------------------------------------------------------------------------

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
        self.correction = nn.Sequential(nn.Linear(2 * state, 32), nn.SiLU(), zero_init(nn.Linear(32, 2 * cameras)))
        self.convs = _convs(((3, 16, 1), (16, 16, 2), (16, 32, 2)))
        self.think = nn.Linear(cameras * 32 * (-(-side // 4)) ** 2 + 2 * state + actions, 128)
        self.leave = zero_init(nn.Linear(128, modes * state))
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
        super().__init__()
        height, width = (-(-side // 8) for side in sides)
        self.convs = _convs(((3 * cameras + 2, 32, 2), (32, 32, 2), (32, 32, 2)))
        self.think = nn.Linear(32 * height * width + 2 * state + actions, 128)
        self.leave = zero_init(nn.Linear(128, modes * state))

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


# -- where the robot is in a picture, without labels -------------------------------------------------------------------


class RobotPosition(nn.Module):
    """The robot's position (x, y) in every camera's picture, linear in its normalised state; 0 before :meth:`fit`.

    Only the robot moves with the robot's state; everything else moves otherwise, or not at all.  So the shift of
    each picture against a template, by cross-correlation over all shifts (Kuglin & Hines 1975, without whitening),
    is fitted as linear in the state, which leaves out whatever does not follow it; the pictures, shifted back by
    that, make a sharper template; and so on (congealing, Learned-Miller 2006, for shifts).

    A shift is right within a pixel or an outlier, and a robot's state often contains a position twice (the measured
    and the commanded one), so least squares would follow a few outliers and give large weights that cancel.  Hence
    Cauchy weights (Holland & Welsch 1977) and a little ridge (Hoerl & Kennard 1970).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, cameras: int, state: int) -> None:
        super().__init__()
        self.cameras = cameras
        self.register_buffer("weight", torch.zeros(2 * cameras, state))
        self.register_buffer("bias", torch.zeros(2 * cameras))

    def forward(self, state: Tensor) -> Tensor:
        """[B,2 cameras], from -1 to 1, for ``state`` [B,S]; in float32 whatever matrix products are computed in."""
        return (state.float()[:, None] * self.weight).sum(2) + self.bias

    @torch.no_grad()
    def fit(self, pictures: Tensor, state: Tensor) -> None:
        """Find the robot in ``pictures`` [N,C,h,w] of ``state`` [N,S], once: networks are trained on top of it."""
        if self.weight.any():
            return
        found = [register(camera, state) for camera in pictures.split(3, 1)]
        self.weight.copy_(torch.cat([weight for weight, _ in found]))
        self.bias.copy_(torch.cat([bias for _, bias in found]))

    def moved(self, pictures: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """[B,P,C,h,w]: ``pictures`` [B,C,h,w] moved with the robot from state ``before`` [B,S] to ``after`` [B,P,S].

        Whatever the robot holds is then where it will be, in its own colours.  Borders are repeated.
        """
        shift = self(before)[:, None] - self(after.flatten(0, 1)).unflatten(0, after.shape[:2])
        many = pictures[:, None].expand(-1, after.shape[1], -1, -1, -1).unflatten(2, (self.cameras, 3))
        moved = _shifted_back(many.flatten(0, 2), shift.reshape(-1, 2), "border")
        return moved.view(*after.shape[:2], *pictures.shape[1:])


def register(pictures: Tensor, state: Tensor, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """``(weight [2,S], bias [2])`` with ``weight @ s + bias`` the position (x, y) of a robot in state ``s``.

    From ``pictures`` [N,C,h,w] and the normalised ``state`` [N,S]; positions are from -1 to 1, as for
    ``grid_sample``.  The first template is the picture of the state nearest to 0.
    """
    moving = pictures - pictures.mean(0)
    known = torch.cat([state, torch.ones_like(state[:, :1])], 1)
    template = moving[state.square().sum(1).argmin()]
    for _ in range(rounds):
        fitted = _fitted(known, _shifts(moving, template))
        template = _shifted_back(moving, known @ fitted).mean(0)
    return fitted[:-1].T, fitted[-1] + _center_of_motion(template)


def _fitted(known: Tensor, shifts: Tensor, rounds: int = 10, scale: float = 2.0 / 32, ridge: float = 0.03) -> Tensor:
    """[S+1,2]: ``shifts`` [N,2] as linear in ``known`` [N,S+1], whose last entry is 1.

    Those further off than ``scale``, two of 64 pixels, count little.
    """
    light = ridge * torch.eye(known.shape[1], device=known.device)
    light[-1, -1] = 0.0
    weight = known.new_ones(len(known), 1)
    for _ in range(rounds):
        fitted = torch.linalg.solve((weight * known).T @ known + weight.sum() * light, (weight * known).T @ shifts)
        off = (shifts - known @ fitted).norm(dim=1, keepdim=True)
        weight = 1.0 / (1.0 + (off / scale).square())
    return fitted


def _shifts(moving: Tensor, template: Tensor) -> Tensor:
    """How far ``moving`` [N,C,h,w] are from ``template`` [C,h,w], [N,2] (x, y), at the highest correlation."""
    height, width = moving.shape[-2:]
    size = (2 * height, 2 * width)  # so that what leaves on one side does not return on the other
    spectrum = torch.fft.rfft2(template, s=size).conj()
    correlation = torch.fft.irfft2((torch.fft.rfft2(moving, s=size) * spectrum).sum(1), s=size)
    best = correlation.flatten(1).argmax(1)
    y, x = best // size[1], best % size[1]
    x, y = x - (x >= width) * size[1], y - (y >= height) * size[0]
    return torch.stack([2.0 * x / width, 2.0 * y / height], 1)


def _shifted_back(moving: Tensor, shift: Tensor, padding: str = "zeros") -> Tensor:
    still = torch.eye(2, 3, device=moving.device).expand(len(moving), 2, 3)
    grid = functional.affine_grid(still, list(moving.shape), align_corners=False)
    return functional.grid_sample(moving, grid + shift[:, None, None], padding_mode=padding, align_corners=False)


def _center_of_motion(template: Tensor) -> Tensor:
    """[2] (x, y): mean position in ``template``, weighted by its squares."""
    share = template.square().sum(0)
    share = share / share.sum().clamp_min(1e-12)
    y, x = (torch.linspace(1 / side - 1, 1 - 1 / side, side, device=share.device) for side in share.shape)
    return torch.stack([(share.sum(0) * x).sum(), (share.sum(1) * y).sum()])
