"""Inputs and outputs of one call of a world model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.contract.env import EnvSpec


@dataclass(frozen=True)
class Context:
    """What a prediction is conditioned on.

    pictures  uint8 [B,1+context_frames,C,h,w]  the episode's first frame, then the latest ones in order
    state     float32 [B,S]                     at the latest frame
    task      int64 [B]
    """

    pictures: Tensor
    state: Tensor
    task: Tensor


@dataclass(frozen=True)
class Future:
    """The prediction of a call, up to its last known action.

    pictures     uint8 [B,P,C,h,w]  the one at the last known action is at index :meth:`WorldModel.slot`
    state        float32 [B,F,S]
    outcome      [B,3]              probabilities of "done", "failed" and, for the behaviour in the data, "will be done"
    uncertainty  [B]                see ``WorldModelConfig.uncertainty``
    reward       [B,F]              of every known action, 0 beyond; None without a head for it
    """

    pictures: Tensor
    state: Tensor
    outcome: Tensor
    uncertainty: Tensor
    reward: Tensor | None = None


@dataclass(frozen=True)
class Target:
    """What a call is trained to predict.

    pictures  uint8 [B,P,C,h,w]
    state     float32 [B,F,S]
    actions   float32 [B,F,D]  that led there
    known     int64 [B]        how many of the actions the model gets to know
    outcome   float32 [B,3]    after the last known action
    reward    float32 [B,F]    of the actions; None without a head for it
    """

    pictures: Tensor
    state: Tensor
    actions: Tensor
    known: Tensor
    outcome: Tensor
    reward: Tensor | None = None


def state_entries(spec: EnvSpec) -> int:
    """``S`` of a world model: an environment without proprioception has one entry that is always 0."""
    return max(1, spec.state.shape[0])


def mask_actions(actions: Tensor, flag: Tensor) -> Tensor:
    """[B,F,D+1]: ``actions``, 0 where unknown, and ``flag`` [B,F], 1 where known."""
    return torch.cat([actions * flag[..., None], flag[..., None]], -1)


def uniform(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Uniform in [0, 1), drawn on the generator's device, where a seed is always the same, and moved to ``like``'s."""
    return torch.rand(shape, generator=generator, device=generator.device).to(like.device)


def normal(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Standard normal, drawn and moved as by :func:`uniform`."""
    return torch.randn(shape, generator=generator, device=generator.device).to(like.device)


def random_known(count: Tensor, generator: torch.Generator) -> Tensor:
    """[B]: how many of ``count`` [B] actions a training call knows: with probability 1/2 all, else 1 to ``count``."""
    fewer = 1 + (uniform(count.shape, generator, count) * count).long()
    return torch.where(uniform(count.shape, generator, count) < 0.5, count, fewer)


def select_step(items: Tensor, index: Tensor) -> Tensor:
    """[B,...]: entry ``index`` [B] of every batch element of ``items`` [B,F,...]."""
    return items[torch.arange(len(index), device=index.device), index]


def to_unit_range(pictures: Tensor) -> Tensor:
    """uint8 pictures as floats from -1 to 1."""
    return pictures.float() / 127.5 - 1.0
