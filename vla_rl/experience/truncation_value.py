"""What a truncated group member would still have earned, after a time limit or too much model uncertainty.

Its return is its reward so far + V, and it stays in its group.  **Leaving it out is not an option**: that maximises
``E[R | not truncated]``, which rewards actions that lead lost episodes into truncation.  Example: of two equally likely
actions, one succeeds or fails and the other succeeds or is truncated, each with probability 1/2.  The gradient towards
the second action is 1/9 when truncated episodes are dropped, 0 when they earn nothing more, and 1/16 with ``V = .5``,
which is too much if none of them would have succeeded.  So ``V`` is 0 unless a calibrated one exists, and a share of
truncated episodes that rises during training (``truncated`` among the metrics) is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vla_rl.contract.policy import Features


class TruncationValue(Protocol):
    """``V``: a frozen dataclass that estimates what truncated episodes would still have earned."""

    def value(self, final: Features) -> Tensor:
        """float64 [F], undiscounted, from the features of their last observations {name: [F,...]}."""


@dataclass(frozen=True)
class ZeroValue:
    """0: a truncated episode earns nothing more.  Never too high where rewards are not negative."""

    def value(self, final: Features) -> Tensor:
        """Zeros."""
        return torch.zeros(_count(final), dtype=torch.float64)


@dataclass(frozen=True)
class ConstantValue:
    """The same for all: what such episodes earned on average when they were continued, for instance in a simulator.

    It is calibrated only for policies like the one it was measured with; every excess rewards truncation.
    """

    constant: float

    def value(self, final: Features) -> Tensor:
        """``constant`` for each."""
        return torch.full((_count(final),), self.constant, dtype=torch.float64)


def _count(final: Features) -> int:
    return len(next(iter(final.values())))
