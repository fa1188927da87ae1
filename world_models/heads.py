"""Small networks beside the backbone: the robot's position as maps, outcome, inverse dynamics and rewards."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from world_models.config import RewardHeadConfig


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
        return self.leave(cells)

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
        return self.out(torch.cat([found, state, *(item.to(state) for item in codes)], -1))


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
        return self.out(cells.flatten(1))


class RewardHead(nn.Module):
    """The reward of every control step of a call, from what the outcome is read from and from the step itself.

    A call has one set of features; where the robot was, what it did and where it got to say which part of the call's
    reward a step earned.  All steps share the weights, so a call teaches ``F`` of them.

    It is a regression of the normalised reward: the mean of the squared error's minimum is the expected reward, which
    is what a return adds up.  The rewards are recorded before anything is trained, so their scale is known and is kept
    with the weights.  (DreamerV3, Hafner et al. 2023, arXiv 2301.04104, classifies symlog rewards into bins, since it
    must do for scales that it cannot know.)
    """

    mean: Tensor
    std: Tensor
    fitted: Tensor

    def __init__(
        self,
        width: int,
        sides: tuple[int, int],
        state: int,
        actions: int,
        tasks: int,
        frames: int,
        config: RewardHeadConfig,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.heads, self.sides, self.norm = heads, sides, nn.LayerNorm(width)
        self.queries = nn.Embedding(tasks, heads * width)
        inputs = (heads + 1) * width + 2 * heads + 2 * state + actions + tasks + 2 * frames
        self.out = nn.Sequential(nn.Linear(inputs, config.width), nn.SiLU(), nn.Linear(config.width, 1))
        self.tasks, self.frames, self.weight = tasks, frames, config.weight
        for name, value in (("mean", 0.0), ("std", 1.0), ("fitted", False)):
            self.register_buffer(name, torch.tensor(value))

    @torch.no_grad()
    def fit(self, rewards: Tensor) -> None:
        """Take the scale of the recorded ``rewards`` [n], once: a model that is trained further keeps its own."""
        if not self.fitted:
            self.mean.copy_(rewards.mean())
            self.std.copy_(rewards.std(correction=0) if rewards.std(correction=0) > 0 else torch.ones(()))
            self.fitted.fill_(True)

    def forward(self, features: Tensor, call: tuple[Tensor, Tensor, Tensor], task: Tensor, known: Tensor) -> Tensor:
        """Normalised rewards [B,F] from ``features`` [B,N,d] and the ``call``, for ``task`` [B].

        ``call``, all normalised: the state before [B,S], the states [B,F,S] and the actions [B,F,D], of which the first
        ``known`` [B] count.
        """
        before, states, actions = call
        counts = self._counts(known)[..., None]
        steps = torch.cat([torch.cat([before[:, None], states[:, :-1]], 1), states, actions], -1) * counts
        queries = self.queries(task).unflatten(-1, (self.heads, -1))
        found = attended(self.norm(features), queries, self.sides)
        codes = [functional.one_hot(task, self.tasks), functional.one_hot(known - 1, self.frames)]
        seen = torch.cat([found, *(item.to(found) for item in codes)], -1)[:, None].expand(-1, self.frames, -1)
        frame = torch.eye(self.frames, device=steps.device).expand(len(steps), -1, -1)
        rewards: Tensor = self.out(torch.cat([seen, steps, frame], -1))[..., 0]
        return rewards.float()

    def predict(self, features: Tensor, call: tuple[Tensor, Tensor, Tensor], task: Tensor, known: Tensor) -> Tensor:
        """Rewards [B,F] in the environment's units, 0 beyond the ``known`` [B] actions; see :meth:`forward`."""
        rewards = self.mean + self.std * self(features, call, task, known)
        return rewards * self._counts(known)

    def loss(
        self, features: Tensor, call: tuple[Tensor, Tensor, Tensor], task: Tensor, known: Tensor, rewards: Tensor
    ) -> Tensor:
        """Squared error of the recorded ``rewards`` [B,F] of the ``known`` [B] actions, normalised."""
        error = (self(features, call, task, known) - (rewards - self.mean) / self.std).square()
        counts = self._counts(known)
        return (error * counts).sum() / counts.sum()

    def _counts(self, known: Tensor) -> Tensor:
        """[B,F]: 1.0 for the first ``known`` [B] control steps."""
        return (torch.arange(self.frames, device=known.device) < known[:, None]).float()
