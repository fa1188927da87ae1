"""Small networks beside the backbone: where the robot is, how the task stands, and which actions were made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional


class Motion(nn.Module):
    """Where the robot goes by what it does alone, without a look at the world."""

    def __init__(self, state: int, told: int, frames: int, width: int = 384) -> None:
        """``told``: entries that tell the actions; ``frames`` F."""
        super().__init__()
        self.frames = frames
        sizes = [state + told, width, width, width]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        self.think = nn.Sequential(*layers, nn.Linear(width, frames * state))
        self.straight = nn.Linear(state + told, frames * state)  # most of it is linear

    def forward(self, state: Tensor, told: Tensor) -> Tensor:
        """The state [B,F,S] expected from ``state`` [B,S] under ``told`` [B,A]."""
        known = torch.cat([state, told], 1)
        expected: Tensor = state[:, None] + (self.think(known) + self.straight(known)).unflatten(1, (self.frames, -1))
        return expected


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


class Touch(nn.Module):
    """How the world changes where the robot goes: candidates, with their odds, for where it will be.

    What matters most about the future is often one of two things, and the robot feels which: fingers stop at a cube or
    close.  A single answer would be their mean, which never happens and which the next call could make nothing of.

    It looks closely at two places of the picture only, where the robot is and where it will be; the places are linear
    layers and learnt with the rest (a spatial transformer without scale, Jaderberg et al. 2015, arXiv 1506.02025).  So
    what was learnt about a grasp in one place holds in all of them.
    """

    def __init__(
        self, picture: tuple[int, int, int], state: int, told: int, frames: int, candidates: int, side: int = 24
    ) -> None:
        """``picture`` (C, h, w); ``told`` and ``frames`` as for :class:`Motion`; ``side``: pixels looked at."""
        super().__init__()
        channels, height, width = picture
        self.shape, self.frames = (candidates, frames * state + 1), frames
        self.camera = nn.Sequential(nn.Linear(state, 32), nn.SiLU(), _nowhere(nn.Linear(32, 2)))
        self.straight = _nowhere(nn.Linear(state, 2))  # a camera is nearly linear
        sizes = ((channels, 32, 1), (32, 32, 2), (32, 64, 2))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride, 1) for a, b, stride in sizes)
        self.look = nn.Linear(64 * (-(-side // 4)) ** 2, 128)
        known = 2 * 128 + state + told + frames * state
        self.think = nn.Sequential(nn.Linear(known, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
        self.leave = nn.Linear(256, math.prod(self.shape))
        with torch.no_grad():
            self.leave.weight.mul_(0.1)
        steps = torch.arange(side) - (side - 1) / 2
        near = torch.stack(torch.meshgrid(2 * steps / width, 2 * steps / height, indexing="xy"), -1)
        self.register_buffer("near", near, persistent=False)

    near: Tensor

    def forward(
        self, picture: Tensor, state: Tensor, told: Tensor, expected: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States [B,K,F,S] and their log-odds [B,K].

        From ``picture`` [B,C,h,w], ``state`` [B,S], what is ``expected`` [B,F,S] and, of it, the ``last`` [B,S] known.
        """
        seen = [self._glimpse(picture, at) for at in (state, last)]
        out = self.leave(self.think(torch.cat([*seen, state, told, expected.flatten(1)], 1)))
        out = out.unflatten(1, self.shape).float()
        return expected[:, None] + out[..., 1:].unflatten(2, (self.frames, -1)), out[..., 0].log_softmax(1)

    def _glimpse(self, picture: Tensor, state: Tensor) -> Tensor:
        """[B,128]: what is around the place where a robot in ``state`` [B,S] would be."""
        place = (self.straight(state) + self.camera(state)).float()[:, None, None]
        cells = functional.grid_sample(picture, self.near + place, align_corners=False, padding_mode="border")
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        found: Tensor = functional.silu(self.look(cells.flatten(1)))
        return found


def _nowhere(layer: nn.Linear) -> nn.Linear:
    """``layer`` with 0 for all inputs: the middle of the picture."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def attended(cells: Tensor, queries: Tensor, sides: tuple[int, int]) -> Tensor:
    """[B,H(d+2)+d]: what ``queries`` [B,H,d] find in ``cells`` [B,N,d], where that is, and the mean of all.

    The places, means over the weights (spatial softmax, Levine et al. 2016, arXiv 1504.00702), are finer than a cell:
    whether fingers are around a cube is a matter of less than that.  ``sides`` (y, x) with ``y x = N``.
    """
    weight = (queries @ cells.transpose(1, 2) / cells.shape[-1] ** 0.5).softmax(-1)
    y, x = (torch.linspace(-1, 1, side, device=cells.device) for side in sides)
    places = torch.cartesian_prod(y, x).to(weight)
    return torch.cat([(weight @ cells).flatten(1), (weight @ places).flatten(1), cells.mean(1)], -1)


# Which of the candidates [B,K,F,S] with log-odds [B,K], int64 [B], given chance [B] from a standard normal.
Choose: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_chance(candidates: Tensor, odds: Tensor, chance: Tensor) -> Tensor:
    """Each as often as its odds say."""
    share = torch.special.ndtr(chance)[:, None]
    return (odds.exp().cumsum(1) < share).sum(1).clamp_max(odds.shape[1] - 1)


def surprise(candidates: Tensor, odds: Tensor, wanted: Tensor, counts: Tensor, spread: float = 0.1) -> Tensor:
    """Negative log-likelihood [B], per entry, of ``wanted`` [B,F,S] under Gaussians around ``candidates`` [B,K,F,S].

    Their common standard deviation is ``spread``, so that the nearest candidate learns from what happened; ``counts``
    [B,F] is 1 for control steps that did.
    """
    off = ((candidates - wanted[:, None]) / spread).square().sum(-1)
    nll = -(odds - 0.5 * (off * counts[:, None]).sum(2)).logsumexp(1)
    return nll / math.prod(wanted.shape[1:])


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
