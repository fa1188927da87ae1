"""Standardising network inputs by fixed statistics, or by running statistics of all training data so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.policies.normalization import Affine

_CLIP = 10.0  # standard deviations; inputs far from all data so far must not blow up the network
_EPSILON = 1e-8  # added to the variance; a constant entry becomes 0


class FixedStandardizer(nn.Module):
    """``Affine`` as a module; ``observe`` changes nothing."""

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
    """Config: standardise a vector of ``size`` entries by a :class:`RunningStandardizer`."""

    size: int


class RunningStandardizer(nn.Module):
    """``(x - mean) / std`` clipped to +-10, with mean and population std (float64) of everything observed.

    The statistics are merged exactly (Chan, Golub, LeVeque 1979).  Only :meth:`observe` changes them, and a learner
    calls it after its update: acting and learning use the same statistics in between, so ratios start at 1.  They are
    parameters without gradient, so that they are published, saved and restored with the weights.  Before the first
    ``observe`` the module is the identity, up to the clipping.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(size, dtype=torch.float64), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=False)

    def forward(self, physical: Tensor) -> Tensor:
        scale = (self.variance + _EPSILON).rsqrt()
        # Subtract in float64: for values far from 0, float32 would lose most digits.
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
    """The module for a config."""
    return FixedStandardizer(by) if isinstance(by, Affine) else RunningStandardizer(by.size)
