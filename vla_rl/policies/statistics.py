"""Standardising what a network sees: by fixed statistics, or by those of all that was learnt from so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.policies.normalization import Affine

_CLIP = 10.0  # standard deviations; a first glance at a new region must not blow up the network
_EPSILON = 1e-8  # of a variance: an entry that never changes is 0


class Standardizer(Protocol):
    """A module from physical [...,S] to standardised [...,S]."""

    def __call__(self, physical: Tensor) -> Tensor: ...

    def observe(self, physical: Tensor, reducer: Reducer) -> None:
        """Take in what all processes have learnt from, [B,S] here."""


class FixedStandardizer(nn.Module):
    """``Affine`` as a module; nothing that is seen changes it."""

    offset: Tensor
    scale: Tensor

    def __init__(self, affine: Affine) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(affine.offset, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.tensor(affine.scale, dtype=torch.float64), persistent=False)

    def forward(self, physical: Tensor) -> Tensor:
        return (physical - self.offset.to(physical)) / self.scale.to(physical)

    def observe(self, physical: Tensor, reducer: Reducer) -> None:
        pass


@dataclass(frozen=True)
class RunningStatistics:
    """Says that the ``size`` entries of a vector are standardised by :class:`RunningStandardizer`."""

    size: int


class RunningStandardizer(nn.Module):
    """``(x - mean) / std`` clipped to +-10, by mean and population std of all that was observed (float64).

    The statistics are merged exactly (Chan, Golub, LeVeque 1979) and change in :meth:`observe` alone, which a learner
    calls after its update: acting and learning see the same numbers in between, so ratios stay 1.  They are parameters
    without gradient, so that they go wherever weights go: to those who act, into checkpoints, back to the best ones.
    Before the first ``observe`` it is the identity, up to the clipping.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(size, dtype=torch.float64), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=False)

    def forward(self, physical: Tensor) -> Tensor:
        scale = (self.variance + _EPSILON).rsqrt()
        # Subtracted in float64: far from 0, little would be left of float32's digits.
        standard = (physical - self.mean) * scale
        return standard.clamp(-_CLIP, _CLIP).to(physical.dtype)

    @torch.no_grad()
    def observe(self, physical: Tensor, reducer: Reducer) -> None:
        """Merge the statistics of all processes' ``physical``, [B,S] in this one."""
        values = physical.double()
        fresh = reducer.sum(torch.tensor(float(len(values)), dtype=torch.float64, device=values.device))
        mean = reducer.sum(values.sum(0)) / fresh
        squares = reducer.sum((values - mean).square().sum(0))
        total, gap = self.count + fresh, mean - self.mean
        squares = squares + self.variance * self.count + gap.square() * self.count * fresh / total
        self.mean.copy_(self.mean + gap * fresh / total)
        self.variance.copy_(squares / total)
        self.count.copy_(total)


def build_standardizer(by: Affine | RunningStatistics) -> FixedStandardizer | RunningStandardizer:
    """The module that does what ``by`` says."""
    return FixedStandardizer(by) if isinstance(by, Affine) else RunningStandardizer(by.size)
