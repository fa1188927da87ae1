"""Small networks beside the backbone: maps of the robot's position, the task's outcome, and inverse dynamics."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def with_coordinates(cells: Tensor) -> Tensor:
    """[B,c+2,y,x]: ``cells`` [B,c,y,x] and their coordinates from -1 to 1."""
    y, x = (torch.linspace(-1, 1, side, device=cells.device) for side in cells.shape[-2:])
    coordinates = torch.stack(torch.meshgrid(y, x, indexing="ij")).to(cells)
    return torch.cat([cells, coordinates.expand(len(cells), -1, -1, -1)], 1)


class PoseMaps(nn.Module):
    """Maps of where in the picture a robot in a given state is, at the resolution of the latents.

    They are made from coarse to fine, so neighbouring cells share weights; a linear layer for every cell would learn
    each of them anew.
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
        """Squared error of the ``latents`` [B,c,y,x] of a picture, as predicted from ``state`` [B,S] alone."""
        return (self.paint(self(state)) - latents.detach()).square().mean()


def attended(cells: Tensor, queries: Tensor, sides: tuple[int, int]) -> Tensor:
    """[B,H(d+2)+d]: ``cells`` [B,N,d] and their coordinates averaged by attention of ``queries`` [B,H,d], and the mean.

    Averaged coordinates (spatial softmax, Levine et al. 2016, arXiv 1504.00702) are finer than a cell, as is the
    difference between fingers around a cube and beside it.  ``sides`` (y, x) with ``y x = N``.
    """
    weight = (queries @ cells.transpose(1, 2) / cells.shape[-1] ** 0.5).softmax(-1)
    y, x = (torch.linspace(-1, 1, side, device=cells.device) for side in sides)
    coordinates = torch.cartesian_prod(y, x).to(weight)
    return torch.cat([(weight @ cells).flatten(1), (weight @ coordinates).flatten(1), cells.mean(1)], -1)


class OutcomeHead(nn.Module):
    """Logits of "the task is done", "the episode has failed" and "it will be done in the end", at one frame.

    The task's queries attend to all cells, since the same picture is a success for one instruction and a failure for
    another.
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
        found = attended(self.norm(features), self.queries(task).unflatten(-1, (self.heads, -1)), self.sides)
        codes = [functional.one_hot(task, self.tasks), functional.one_hot(frame, self.frames)]
        logits: Tensor = self.out(torch.cat([found, state, *(item.to(state) for item in codes)], -1))
        return logits


class InverseDynamics(nn.Module):
    """The actions between two pictures, estimated: the error is large where predictions ignore their actions."""

    def __init__(self, picture: tuple[int, int, int], actions: int, width: int = 32) -> None:
        """``picture`` (C, h, w); ``actions``: entries to estimate."""
        super().__init__()
        channels, *sides = picture
        sizes = [(2 * channels + 2, width, 5), (width, 2 * width, 3), (2 * width, 2 * width, 3)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, size, 2, size // 2) for a, b, size in sizes)
        cells = 2 * width * math.prod(-(-side // 8) for side in sides)
        self.out = nn.Sequential(nn.Linear(cells, 4 * width), nn.SiLU(), nn.Linear(4 * width, actions))

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Actions [B,A], normalised, between pictures [B,C,h,w] from -1 to 1."""
        cells = with_coordinates(torch.cat([before, after - before], 1))
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        actions: Tensor = self.out(cells.flatten(1))
        return actions
