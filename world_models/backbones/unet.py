"""A small U-Net on pixels: the embedded default, made for 64 x 64 pictures on two CPU cores.

Pixels are folded into channels (patchify), the frames of a call are stacked in channels, and the network estimates the
clean frames themselves, as a correction of the latest context frame: a trunk of 64 channels could not carry the 192
noise dimensions of a patch that a velocity or noise target asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from world_models.backbones import ActionInput, ContextLatents, Denoised, VideoModel, zero_init


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of the network."""

    patch: int = 4  # pixels per side of a cell (patchify)
    width: int = 64  # channels at full resolution
    deep: int = 96  # and at half of it
    depth: int = 2  # residual blocks per level and direction
    heads: int = 4  # of the attention at the lowest resolution, over the whole picture
    embedding: int = 256

    @property
    def multiple(self) -> int:
        return self.patch

    def build(self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int) -> UNet:
        return UNet(picture, context, frames, actions, maps, self)


class UNet(VideoModel):
    """A video model whose latents are the folded pixels."""

    def __init__(
        self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int, config: UNetConfig
    ) -> None:
        """``picture`` (C, h, w); ``context`` M frames; ``frames`` F to predict; sizes of ``ActionInput``: A and P."""
        super().__init__()
        channels, height, width = picture
        patch = config.patch
        self.config, self.frames, self.width = config, frames, config.width
        self.latent = (channels * patch * patch, height // patch, width // patch)
        size = self.latent[0]
        self.embed = nn.Sequential(
            nn.Linear(frames * (actions + 2) + context, config.embedding),
            nn.SiLU(),
            nn.Linear(config.embedding, config.embedding),
            nn.SiLU(),
        )
        channels_in = size * (context + frames) + frames * maps + 2
        self.enter = nn.Conv2d(channels_in, config.width, 3, 1, 1)
        self.down = _blocks(config.width, config.width, config)
        self.shrink = nn.Conv2d(config.width, config.deep, 3, 2, 1)
        self.bottom = _blocks(config.deep, config.deep, config)
        self.attention = Attention(config.deep, config.heads)
        self.rise = _blocks(config.deep, config.deep, config)
        self.grow = nn.Conv2d(config.deep, config.width, 3, 1, 1)
        self.up = _blocks(config.width, config.width, config, also=config.width)
        layers = context + 1  # of which a pixel is mixed: the context and a new colour
        self.leave = zero_init(nn.Conv2d(config.width, frames * (size + layers * patch * patch), 3, 1, 1))
        y, x = (torch.linspace(-1, 1, side) for side in self.latent[1:])
        stay = torch.zeros(layers)
        stay[context - 1] = 3.0  # initially hardly anything changes
        self.register_buffer("stay", stay[:, None, None, None, None], persistent=False)
        self.register_buffer("places", torch.stack(torch.meshgrid(y, x, indexing="ij")), persistent=False)

    places: Tensor
    stay: Tensor

    def encode(self, pictures: Tensor) -> Tensor:
        lead = pictures.shape[:-3]
        return functional.pixel_unshuffle(pictures.flatten(0, -4), self.config.patch).unflatten(0, lead)

    def decode(self, latents: Tensor) -> Tensor:
        lead = latents.shape[:-3]
        return functional.pixel_shuffle(latents.flatten(0, -4), self.config.patch).unflatten(0, lead)

    def forward(self, noisy: Tensor, level: Tensor, context: ContextLatents, action_input: ActionInput) -> Denoised:
        wave = torch.stack([torch.cos(0.5 * math.pi * level), torch.sin(0.5 * math.pi * level)], -1)
        condition = torch.cat([action_input.vector, wave], -1).flatten(1)
        embedding = self.embed(torch.cat([condition, context.level], -1))
        places = self.places.expand(len(noisy), -1, -1, -1)
        x = torch.cat([noisy.flatten(1, 2), context.frames.flatten(1, 2), action_input.maps.flatten(1, 2), places], 1)
        x = _through(self.down, self.enter(x), embedding)
        deep = self.attention(_through(self.bottom, self.shrink(x), embedding))
        deep = self.grow(functional.interpolate(_through(self.rise, deep, embedding), size=x.shape[-2:]))
        x = _through(self.up, torch.cat([deep, x], 1), embedding)
        painted = self.leave(functional.silu(x)).unflatten(1, (self.frames, -1))
        return Denoised(self._compose(painted, context), x.flatten(2).transpose(1, 2))

    def _compose(self, output: Tensor, context: ContextLatents) -> Tensor:
        """Every pixel a mixture of the context frames and a new colour, by ``output`` [B,F,c+(M+1)p^2,y,x].

        What a gripper uncovers or carries need not go through the trunk, and what does not change is kept exactly.
        """
        cells = self.config.patch**2
        colours, choice = output.split([self.latent[0], len(self.stay) * cells], 2)
        share = (choice.unflatten(2, (len(self.stay), 1, cells)) + self.stay).softmax(2)  # [B,F,M+1,1,p^2,y,x]
        kept = context.frames[:, None].expand(-1, self.frames, -1, -1, -1, -1)
        layers = torch.cat([kept, colours[:, :, None]], 2).unflatten(3, (-1, cells))
        return (share * layers).sum(2).flatten(2, 3)


class Block(nn.Module):
    """A residual block whose normalised channels an embedding scales and shifts (adaptive group norm)."""

    def __init__(self, into: int, out: int, embedding: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, into, affine=False), nn.GroupNorm(8, out, affine=False)])
        self.convs = nn.ModuleList([nn.Conv2d(into, out, 3, 1, 1), zero_init(nn.Conv2d(out, out, 3, 1, 1))])
        self.steer = nn.Linear(embedding, 2 * (into + out))
        self.aside = nn.Conv2d(into, out, 1) if into != out else nn.Identity()
        self.sizes = (into, into, out, out)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        steer = self.steer(embedding)[..., None, None].split(self.sizes, 1)
        kept = self.aside(x)
        for norm, conv, scale, shift in zip(self.norms, self.convs, steer[::2], steer[1::2], strict=True):
            x = conv(functional.silu(norm(x) * (1 + scale) + shift))
        return kept + x


class Attention(nn.Module):
    """Self-attention over all cells, [B,c,y,x]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.enter, self.leave = nn.Conv2d(channels, 3 * channels, 1), zero_init(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.enter(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(1))
        return x + self.leave(mixed.transpose(-1, -2).flatten(1, 2).unflatten(-1, x.shape[-2:]))


def _blocks(into: int, out: int, config: UNetConfig, also: int = 0) -> nn.ModuleList:
    """``depth`` blocks, the first with ``also`` more input channels."""
    return nn.ModuleList(Block(into + (also if i == 0 else 0), out, config.embedding) for i in range(config.depth))


def _through(blocks: nn.ModuleList, x: Tensor, embedding: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, embedding)
    return x
