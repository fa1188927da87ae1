"""What a call of a world model is made with, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Now:
    """Where a prediction starts.

    pictures  uint8 [B,1+memory,C,h,w]  the episode's first, then the latest ones in order
    state     float32 [B,S]
    task      int64 [B]
    """

    pictures: Tensor
    state: Tensor
    task: Tensor


@dataclass(frozen=True)
class Future:
    """What a call predicts at the last known control step, and the way there.

    pictures  uint8 [B,P,C,h,w]     the last one that counts is :meth:`WorldModel.slot`
    state     float32 [B,F,S]
    outcome   [B,3]                 probabilities of "done", "failed" and, for whoever acted in the data, "will be done"
    doubt     [B]                   see :func:`world_models.uncertainty.disagreement`
    """

    pictures: Tensor
    state: Tensor
    outcome: Tensor
    doubt: Tensor


@dataclass(frozen=True)
class Aim:
    """What came: pictures uint8 [B,P,C,h,w], state [B,F,S], the actions [B,F,D] that led there, how many of them count
    [B], and whether the task was done and had failed [B,2] after these."""

    pictures: Tensor
    state: Tensor
    actions: Tensor
    known: Tensor
    outcome: Tensor


def flagged(actions: Tensor, flag: Tensor) -> Tensor:
    """[B,F,D+1]: ``actions``, 0 where unknown, and ``flag`` [B,F], whether they are known."""
    return torch.cat([actions * flag[..., None], flag[..., None]], -1)


def uniform(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """From 0 to 1, drawn where ``generator`` is and taken to where ``like`` is: a seed means the same on any device."""
    return torch.rand(shape, generator=generator, device=generator.device).to(like.device)


def normal(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Standard normal, drawn as :func:`uniform` is."""
    return torch.randn(shape, generator=generator, device=generator.device).to(like.device)


def some(count: Tensor, generator: torch.Generator) -> Tensor:
    """How many of ``count`` [B] control steps a call is made for: all of them or, as often, some."""
    some = 1 + (uniform(count.shape, generator, count) * count).long()
    return torch.where(uniform(count.shape, generator, count) < 0.5, count, some)


def at(items: Tensor, index: Tensor) -> Tensor:
    """Of every row of ``items`` [B,F,...] the entry at its ``index`` [B], [B,...]."""
    return items[torch.arange(len(index), device=index.device), index]


def floats(pictures: Tensor) -> Tensor:
    """uint8 pictures from -1 to 1."""
    return pictures.float() / 127.5 - 1.0
