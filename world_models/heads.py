"""Small networks beside the backbone: how a robot looks, how the task stands, and which actions were made."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def with_places(cells: Tensor) -> Tensor:
    """``cells`` [B,c,y,x] and where each is, [B,c+2,y,x]."""
    y, x = (torch.linspace(-1, 1, side, device=cells.device) for side in cells.shape[-2:])
    places = torch.stack(torch.meshgrid(y, x, indexing="ij")).to(cells)
    return torch.cat([cells, places.expand(len(cells), -1, -1, -1)], 1)


class PoseMaps(nn.Module):
    """Where in the picture a robot in some state is, as maps at the places of the latents.

    They are made from coarse to fine, so what is near in the picture shares what was learnt; a linear layer for every
    place would learn each of them anew.
    """

    def __init__(self, state: int, maps: int, latent: tuple[int, int, int], width: int = 64) -> None:
        """``latent`` (c, y, x): the latents that the maps are for."""
        super().__init__()
        size, *self.sides = latent
        self.coarse = [-(-side // 4) for side in self.sides]
        cells = width // 4 * math.prod(self.coarse)
        self.enter = nn.Sequential(nn.Linear(state, 256), nn.SiLU(), nn.Linear(256, cells), nn.SiLU())
        self.convs = nn.ModuleList(
            nn.Conv2d(into, out, 3, 1, 1) for into, out in ((width // 4, width), (width, width // 2))
        )
        self.leave = nn.Conv2d(width // 2, maps, 3, 1, 1)
        self.paint = nn.Conv2d(maps, size, 1)

    def forward(self, state: Tensor) -> Tensor:
        """[B,maps,y,x] for ``state`` [B,S]."""
        cells = self.enter(state).unflatten(1, (-1, *self.coarse))
        for part, conv in zip((2, 1), self.convs, strict=True):
            cells = functional.interpolate(cells, size=[-(-side // part) for side in self.sides])
            cells = functional.silu(conv(cells))
        maps: Tensor = self.leave(cells)
        return maps

    def loss(self, state: Tensor, latents: Tensor) -> Tensor:
        """How far the latents [B,c,y,x] of a picture are off that are painted from ``state`` [B,S] alone."""
        return (self.paint(self(state)) - latents.detach()).square().mean()


def attended(cells: Tensor, queries: Tensor, sides: tuple[int, int]) -> Tensor:
    """[B,H(d+2)+d]: what ``queries`` [B,H,d] find in ``cells`` [B,N,d], where that is, and the mean of all.

    The places, means over the weights (spatial softmax, Levine et al. 2016, arXiv 1504.00702), are finer than a cell:
    whether fingers are around a cube is a matter of less than that.  ``sides`` (y, x) with ``y x = N``.
    """
    weight = (queries @ cells.transpose(1, 2) / cells.shape[-1] ** 0.5).softmax(-1)
    y, x = (torch.linspace(-1, 1, side, device=cells.device) for side in sides)
    places = torch.cartesian_prod(y, x).to(weight)
    return torch.cat([(weight @ cells).flatten(1), (weight @ places).flatten(1), cells.mean(1)], -1)


class OutcomeHead(nn.Module):
    """Logits of "the task is done", "the episode has failed" and "it will be done in the end", at one frame.

    The task chooses where to look (attention over all places), since the same picture is a success for one instruction
    and a failure for another.
    """

    def __init__(self, width: int, sides: tuple[int, int], state: int, tasks: int, frames: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.sides, self.norm = heads, sides, nn.LayerNorm(width)
        self.queries = nn.Embedding(tasks, heads * width)
        self.out = nn.Sequential(
            nn.Linear((heads + 1) * width + 2 * heads + state + frames + tasks, width), nn.SiLU(), nn.Linear(width, 3)
        )
        self.tasks, self.frames = tasks, frames

    def forward(self, features: Tensor, state: Tensor, task: Tensor, frame: Tensor) -> Tensor:
        """[B,3] from ``features`` [B,N,d] and the robot's ``state`` [B,S], for ``task`` [B], at ``frame`` [B]."""
        seen = attended(self.norm(features), self.queries(task).unflatten(-1, (self.heads, -1)), self.sides)
        told = [functional.one_hot(task, self.tasks), functional.one_hot(frame, self.frames)]
        logits: Tensor = self.out(torch.cat([seen, state, *(item.to(state) for item in told)], -1))
        return logits


class InverseDynamics(nn.Module):
    """Which actions led from one picture to another: what a dream that ignores its actions is found out by."""

    def __init__(self, picture: tuple[int, int, int], actions: int, width: int = 32) -> None:
        """``picture`` (C, h, w); ``actions``: entries to tell."""
        super().__init__()
        channels, *sides = picture
        sizes = [(2 * channels + 2, width, 5), (width, 2 * width, 3), (2 * width, 2 * width, 3)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, size, 2, size // 2) for a, b, size in sizes)
        cells = 2 * width * math.prod(-(-side // 8) for side in sides)
        self.out = nn.Sequential(nn.Linear(cells, 4 * width), nn.SiLU(), nn.Linear(4 * width, actions))

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Actions [B,A], normalised, between pictures [B,C,h,w] from -1 to 1."""
        cells = with_places(torch.cat([before, after - before], 1))
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        told: Tensor = self.out(cells.flatten(1))
        return told
