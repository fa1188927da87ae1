"""A diffusion transformer on the latents of its own autoencoder: for larger pictures than the U-Net is made for.

Every frame, context or predicted, is a set of tokens, one for each cell of its latents; all attend to all.  A frame's
own noise level and the action before it scale and shift its tokens (adaLN-Zero, Peebles & Xie 2023, arXiv 2212.09748; a
level for every frame: Chen et al. 2024, arXiv 2407.01392), and maps of the robot's position are additional channels.

The target is rectified flow's, ``x_t = (1-t) x + t eps``, preconditioned (Karras et al. 2022, arXiv 2206.00364, eq. 7,
in that time).  The prior of a frame is the latest context frame, ``l``, plus a change of standard deviation ``s``:

    r = x_t - (1-t) l        c_in = 1 / sqrt((1-t)^2 s^2 + t^2)
    x^ = l + c_skip r + c_out F(c_in r)        c_skip = (1-t) s^2 c_in^2        c_out = t s c_in

What the network ``F`` learns has unit variance at every level, its output of zero is the best linear guess, and the
velocity ``v = (x_t - x^) / t`` is finite down to ``t = 0``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import UserError
from world_models.backbones import ActionInput, ContextLatents, Denoised, VideoModel, zero_init

_WAVES = 16  # frequencies that encode a noise level


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of the autoencoder and of the transformer."""

    fold: int = 8  # pixels per side in one place of the latents
    channels: int = 8  # of the latents
    lens: int = 32  # channels inside the autoencoder
    width: int = 192
    depth: int = 6
    heads: int = 6
    spread: float = 0.5  # s: standard deviation of how latents change within a call

    @property
    def multiple(self) -> int:
        return self.fold

    def build(self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int) -> DiT:
        return DiT(picture, context, frames, actions, maps, self)


class DiT(VideoModel):
    """A video model with its own autoencoder.  ``M`` context frames and ``F`` to come make ``(M + F) y x`` tokens."""

    def __init__(
        self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int, config: DiTConfig
    ) -> None:
        """``picture`` (C, h, w); ``context`` M frames; ``frames`` F to predict; sizes of ``ActionInput``: A and P.

        Raises UserError for pictures that do not fold and for a width that the heads cannot share.
        """
        super().__init__()
        self.width = width = config.width
        if width % config.heads:
            raise UserError(
                f"a width of {width} cannot be shared by {config.heads} heads, so there is no attention; choose a "
                "multiple."
            )
        self.config, self.num_context, self.frames = config, context, frames
        self.autoencoder = Autoencoder(picture, config.fold, config.channels, config.lens)
        size, *sides = self.latent = self.autoencoder.latent
        self.enter = nn.Linear(2 * size + maps, width)
        self.places = nn.Parameter(0.02 * torch.randn(math.prod(sides), width))
        self.slots = nn.Parameter(0.02 * torch.randn(context + frames, width))
        self.level = nn.Sequential(nn.Linear(2 * _WAVES, width), nn.SiLU(), nn.Linear(width, width))
        self.move = nn.Linear(actions, width)
        self.blocks = nn.ModuleList(Block(width, config.heads) for _ in range(config.depth))
        self.steer, self.leave = zero_init(nn.Linear(width, 2 * width)), zero_init(nn.Linear(width, size))
        self.mix = nn.Linear(frames * width, width)

    def encode(self, pictures: Tensor) -> Tensor:
        return self.autoencoder.encode(pictures).detach()  # latents are not to become easy to predict

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)

    def reconstruction(self, pictures: Tensor) -> Tensor:
        return self.autoencoder.loss(pictures)

    def forward(self, noisy: Tensor, level: Tensor, context: ContextLatents, action_input: ActionInput) -> Denoised:
        latest = context.frames[:, -1:]
        share = level[..., None, None, None]
        change = noisy - (1.0 - share) * latest
        enter, skip, out = preconditioned(share, self.config.spread)
        tokens = self._tokens(torch.cat([context.frames, enter * change], 1), latest, action_input.maps)
        embedding = self.slots + self.level(_waves(torch.cat([context.level, level], 1)))
        embedding = embedding + functional.pad(self.move(action_input.vector), (0, 0, self.num_context, 0))
        embedding = functional.silu(embedding)
        for block in self.blocks:
            tokens = block(tokens, embedding)
        tokens = tokens[:, self.num_context :]
        shift, scale = self.steer(embedding[:, self.num_context :])[:, :, None].chunk(2, -1)
        output = self.leave(_normal(tokens) * (1.0 + scale) + shift)
        output = output.transpose(2, 3).unflatten(-1, self.latent[1:])
        features = self.mix(tokens.transpose(1, 2).flatten(2))
        return Denoised(latest + skip * change + out * output, features)

    def _tokens(self, frames: Tensor, latest: Tensor, maps: Tensor) -> Tensor:
        """[B,M+F,yx,d]: each cell has its frame, the latest frame and, in predicted frames, the maps."""
        maps = functional.pad(maps, (0, 0, 0, 0, 0, 0, self.num_context, 0))
        cells = torch.cat([frames, latest.expand_as(frames), maps], 2)
        return self.enter(cells.flatten(3).transpose(2, 3)) + self.places


class Block(nn.Module):
    """Attention over all tokens, then two linear layers on each; the embedding gates both, initially to zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.steer = zero_init(nn.Linear(width, 6 * width))
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """``x`` [B,T,N,d], ``embedding`` [B,T,d]."""
        steer = self.steer(embedding)[:, :, None].chunk(6, -1)
        x = x + steer[2] * self._attend(_normal(x) * (1.0 + steer[1]) + steer[0])
        return x + steer[5] * self.think(_normal(x) * (1.0 + steer[4]) + steer[3])

    def _attend(self, x: Tensor) -> Tensor:
        parts = self.enter(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        return self.leave(mixed.transpose(1, 2).flatten(2)).unflatten(1, x.shape[1:3])


def preconditioned(level: Tensor, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(c_in, c_skip, c_out)`` at noise ``level`` for changes of standard deviation ``spread``; see the module."""
    clean = 1.0 - level
    enter = torch.rsqrt((clean * spread).square() + level.square())
    return enter, clean * spread**2 * enter.square(), level * spread * enter


def _waves(level: Tensor) -> Tensor:
    """``level`` [...] from 0 to 1 as cosines and sines [...,2W] of periods from 2 down to 1/16."""
    pace = math.pi * torch.logspace(0.0, 5.0, _WAVES, base=2.0, device=level.device)
    angle = level[..., None] * pace
    return torch.cat([angle.cos(), angle.sin()], -1)


def _normal(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


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
        first, second = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.convs = nn.ModuleList([first, zero_init(second)])

    def forward(self, x: Tensor) -> Tensor:
        change = x
        for conv in self.convs:
            change = conv(functional.silu(change))
        return x + change


def _unit(latents: Tensor) -> Tensor:
    """``latents`` [B,c,y,x] with root mean square 1 over ``c``."""
    return latents * torch.rsqrt(latents.square().mean(1, keepdim=True) + 1e-6)
