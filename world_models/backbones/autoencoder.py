"""A small convolutional autoencoder of pictures: the latents that a backbone predicts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import UserError


class Autoencoder(nn.Module):
    """Pictures [B,C,h,w] from -1 to 1 to latents [B,c,h/fold,w/fold] and back.

    The latents of a place have root mean square 1, by division and not by a learned scale, so that a noise level means
    the same at every moment of training.  (Latent diffusion, Rombach et al. 2022, arXiv 2112.10752, has a KL penalty
    and a measured scale there.)
    """

    def __init__(self, picture: tuple[int, int, int], fold: int, channels: int, width: int) -> None:
        """``picture`` (C, h, w), ``fold`` pixels per side in a place; raises UserError when they do not fit."""
        super().__init__()
        colours, height, breadth = picture
        halvings = fold.bit_length() - 1
        if fold < 2 or fold != 1 << halvings or height % fold or breadth % fold:
            raise UserError(
                f"pictures of {height} x {breadth} pixels cannot be folded by {fold}, so they have no latents; choose "
                "a fold of 2, 4, 8, ... that divides both sides."
            )
        self.latent = (channels, height // fold, breadth // fold)
        inward: list[nn.Module] = [nn.PixelUnshuffle(2), nn.Conv2d(4 * colours, width, 3, 1, 1)]
        outward: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1), Residual(width)]
        for _ in range(halvings - 1):
            inward += [Residual(width), nn.Conv2d(width, width, 4, 2, 1)]
            outward += [nn.Conv2d(width, 4 * width, 3, 1, 1), nn.PixelShuffle(2), Residual(width)]
        inward += [Residual(width), nn.Conv2d(width, channels, 3, 1, 1)]
        outward += [nn.Conv2d(width, 4 * colours, 3, 1, 1), nn.PixelShuffle(2)]
        self.inward, self.outward = nn.Sequential(*inward), nn.Sequential(*outward)

    def encode(self, pictures: Tensor) -> Tensor:
        """Latents [...,c,y,x] of ``pictures`` [...,C,h,w]."""
        lead = pictures.shape[:-3]
        latents: Tensor = self.inward(pictures.flatten(0, -4))
        return _unit(latents).unflatten(0, lead)

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [...,C,h,w] of ``latents`` [...,c,y,x], which need not have root mean square 1."""
        lead = latents.shape[:-3]
        pictures: Tensor = self.outward(_unit(latents.flatten(0, -4)))
        return pictures.unflatten(0, lead)

    def loss(self, pictures: Tensor) -> Tensor:
        """Mean squared error of ``pictures`` [...,C,h,w] after encoding and decoding."""
        return functional.mse_loss(self.decode(self.encode(pictures)), pictures)


class Residual(nn.Module):
    """Two convolutions beside the identity, to which it is initialised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        nn.init.zeros_(self.convs[1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.convs[1].bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        change = x
        for conv in self.convs:
            change = conv(functional.silu(change))
        return x + change


def _unit(latents: Tensor) -> Tensor:
    """``latents`` [B,c,y,x] with root mean square 1 over ``c``."""
    return latents * torch.rsqrt(latents.square().mean(1, keepdim=True) + 1e-6)
