"""Where the robot will be: candidates from what it does, and which of them, from a close look.

What matters most about the future is often one of two things, and the robot feels which: fingers stop at a cube or
close.  A single answer would be their mean, which never happens and which the next call could make nothing of.  So
there are candidates, with odds (a mixture density network, Bishop 1994), for each entry of the state by itself: what
stops a hand is not what stops its fingers, and candidates for all entries at once would be all pairs of the two.

The candidates come from the movement alone and the odds from the picture, because a network that learns both learns
the odds hardly at all: the gradient of a place is larger than that of a choice by the inverse of the spread, squared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from world_models.types import uniform

# Which of the candidates [B,K,F,S] with log-odds [B,K,S], int64 [B,S], given chance [B,S] from a standard normal.
Choose: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Motion(nn.Module):
    """Where the robot may be by what it does alone, without a look at the world."""

    def __init__(self, state: int, told: int, frames: int, candidates: int, width: int = 256) -> None:
        """``told``: entries that tell the actions; ``frames`` F; ``candidates`` K."""
        super().__init__()
        self.shape = (candidates, frames + 1, state)
        sizes = [state + told, width, width, width]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        self.think = nn.Sequential(*layers, nn.Linear(width, math.prod(self.shape)))
        self.straight = nn.Linear(state + told, frames * state)  # most of it is linear

    def forward(self, state: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        """States [B,K,F,S] and their log-odds [B,K,S], from ``state`` [B,S] under ``told`` [B,A]."""
        known = torch.cat([state, told], 1)
        middle = state[:, None] + self.straight(known).unflatten(1, (-1, state.shape[1]))
        out = self.think(known).unflatten(1, self.shape)
        return middle[:, None] + out[:, :, 1:], out[:, :, 0].log_softmax(1)


class Touch(nn.Module):
    """Which of the candidates it will be, from a close look at where the robot is about to be.

    What was learnt about a grasp in one place of the picture so holds in all of them.  The place begins linear in the
    state, where :func:`world_models.image_registration.register` puts it; where else to look, such as at the table
    below, is learnt with the rest (a spatial transformer without scale, Jaderberg et al. 2015, arXiv 1506.02025).
    """

    near: Tensor
    where: Tensor
    middle: Tensor

    def __init__(
        self, cameras: int, sides: tuple[int, int], state: int, told: int, candidates: int, side: int = 24
    ) -> None:
        """``sides`` (h, w) of a picture; the others as for :class:`Motion`; ``side``: pixels looked at."""
        super().__init__()
        self.cameras = cameras
        self.register_buffer("where", torch.zeros(2 * cameras, state))
        self.register_buffer("middle", torch.zeros(2 * cameras))
        self.correction = nn.Sequential(nn.Linear(2 * state, 32), nn.SiLU(), _nothing(nn.Linear(32, 2 * cameras)))
        sizes = ((3, 16, 1), (16, 16, 2), (16, 32, 2))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride, 1) for a, b, stride in sizes)
        self.think = nn.Linear(cameras * 32 * (-(-side // 4)) ** 2 + 2 * state + told, 128)
        self.leave = _nothing(nn.Linear(128, candidates * state))
        steps = torch.arange(side) - (side - 1) / 2
        near = torch.stack(torch.meshgrid(2 * steps / sides[1], 2 * steps / sides[0], indexing="xy"), -1)
        self.register_buffer("near", near, persistent=False)
        self.pixel = 2.0 / max(sides)

    def forward(
        self, picture: Tensor, state: Tensor, told: Tensor, guess: Guessed, generator: torch.Generator | None = None
    ) -> Tensor:
        """Log-odds [B,K,S] of the candidates of ``guess``.

        From ``picture`` [B,C,h,w], cameras side by side in ``C``, and ``state`` [B,S] under ``told`` [B,A].  With a
        ``generator``, as for learning, each look is up to a pixel off and a fifth of what comes of it is lost.
        """
        course = torch.cat([guess.last, state], 1)
        glimpse = self._glimpse(picture, course, generator)
        thought = functional.silu(self.think(torch.cat([glimpse, course, told], 1)))
        if generator is not None:
            kept = uniform(thought.shape, generator, thought) >= 0.2
            thought = thought * kept / 0.8
        seen = self.leave(thought).float().view_as(guess.odds)
        return (guess.odds + seen).log_softmax(1)

    def _glimpse(self, picture: Tensor, course: Tensor, generator: torch.Generator | None) -> Tensor:
        """[B,G]: what is around where a robot on its ``course`` [B,2S], where it will be and is, would be."""
        end = course[:, : self.where.shape[1]]
        place = functional.linear(end, self.where, self.middle) + self.correction(course).float()
        if generator is not None:
            place = place + self.pixel * (2.0 * uniform(place.shape, generator, place) - 1.0)
        cells = picture.unflatten(1, (self.cameras, 3)).flatten(0, 1)
        grid = self.near + place.view(-1, 1, 1, 2)
        cells = functional.grid_sample(cells, grid, align_corners=False, padding_mode="border")
        for conv in self.convs:
            cells = functional.silu(conv(cells))
        return cells.view(len(picture), -1)


@dataclass(frozen=True)
class Guessed:
    """Where the robot may be: ``candidates`` [B,K,F,S], their log-``odds`` [B,K,S], and where, on average, it will be
    at the ``last`` known control step, [B,S]."""

    candidates: Tensor
    odds: Tensor
    last: Tensor

    @classmethod
    def of(cls, candidates: Tensor, odds: Tensor, known: Tensor) -> Guessed:
        """With ``known`` [B] control steps, 1 to F."""
        ends = candidates[torch.arange(len(known), device=known.device), :, known - 1]
        return cls(candidates, odds, (odds.exp() * ends).sum(1))


def _nothing(layer: nn.Linear) -> nn.Linear:
    """``layer`` with 0 for all inputs."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def by_chance(candidates: Tensor, odds: Tensor, chance: Tensor) -> Tensor:
    """Each as often as its odds say."""
    share = torch.special.ndtr(chance)[:, None]
    return (odds.exp().cumsum(1) < share).sum(1).clamp_max(odds.shape[1] - 1)


def of_them(candidates: Tensor, choice: Tensor) -> Tensor:
    """The states [B,F,S] that are chosen, int64 [B,S], among ``candidates`` [B,K,F,S]."""
    index = choice[:, None, None].expand(-1, 1, candidates.shape[2], -1)
    return candidates.gather(1, index)[:, 0]


def surprise(candidates: Tensor, odds: Tensor, wanted: Tensor, counts: Tensor, spread: float = 0.1) -> Tensor:
    """Negative log-likelihood [B], per entry, of ``wanted`` [B,F,S] under Gaussians around ``candidates`` [B,K,F,S].

    Their common standard deviation is ``spread``, so that the nearest candidate learns from what happened; ``counts``
    [B,F] is 1 for control steps that did.
    """
    off = ((candidates - wanted[:, None]) / spread).square() * counts[:, None, :, None]
    return -(odds - 0.5 * off.sum(2)).logsumexp(1).sum(1) / math.prod(wanted.shape[1:])


def lesson(candidates: Tensor, odds: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """What candidates are taught by: :func:`surprise` [B], and a little of it as seen from afar.

    A candidate far from everything that happens is as good as never meant, so it would learn nothing and another one
    become the mean of two things that happen.
    """
    return surprise(candidates, odds, wanted, counts) + 0.1 * surprise(candidates, odds, wanted, counts, spread=1.0)
