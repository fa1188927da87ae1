"""The robot's position in the picture as a linear function of its state, fitted without labels.

Only the robot moves with the robot's state; everything else moves otherwise, or not at all.  So the shift of each
picture against a template, by cross-correlation over all shifts (Kuglin & Hines 1975, without whitening), is fitted as
linear in the state, which leaves out whatever does not follow it; the pictures, shifted back by that, make a sharper
template; and so on (congealing, Learned-Miller 2006, for shifts).

A shift is right within a pixel or an outlier, and a robot's state often contains a position twice (the measured and the
commanded one), so least squares would follow a few outliers and give large weights that cancel.  Hence Cauchy weights
(Holland & Welsch 1977) and a little ridge (Hoerl & Kennard 1970).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RobotPosition(nn.Module):
    """The robot's position (x, y) in every camera's picture, linear in its normalised state; 0 before :meth:`fit`."""

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
