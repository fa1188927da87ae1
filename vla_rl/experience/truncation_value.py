"""What an episode that was cut off would still have earned: out of time, or in a dream that doubted itself.

Its return is ``R so far + V``, and it stays in its group.  **Leaving it out is not an option**: that ascends
``E[R | not cut off]``, which rewards leading what is lost to where nobody sees how it ends.  Exactly, with two arms
drawn alike, of which one wins or loses and the other wins or is cut off, half of the time each, the gradient towards
the second is 1/9 when cut-off episodes are dropped, 0 when they earn nothing more, and 1/16 with ``V = .5``, which is
too much if none of them would have been won.  So ``V`` is 0 unless a calibrated one exists, and a share of cut-off
episodes that rises while learning (``truncated`` among the metrics) is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vla_rl.contract.policy import Features


class TruncationValue(Protocol):
    """``V``, the frozen dataclass of one way to know what cut-off episodes would still have earned."""

    def beyond(self, last: Features) -> Tensor:
        """float64 [F], undiscounted, given what was kept of their last observations {name: [F,...]}."""


@dataclass(frozen=True)
class ZeroValue:
    """0: what is cut off has earned what it has.  Never too much where rewards are not negative."""

    def beyond(self, last: Features) -> Tensor:
        """Zeros."""
        return torch.zeros(_count(last), dtype=torch.float64)


@dataclass(frozen=True)
class OnAverage:
    """The same for all: what such episodes earned on average when they were played on, in a simulator for instance.

    Calibrated only as far as it was measured, under a policy like the present one; every excess pays for being cut off.
    """

    value: float

    def beyond(self, last: Features) -> Tensor:
        """``value`` for each."""
        return torch.full((_count(last),), self.value, dtype=torch.float64)


def _count(last: Features) -> int:
    return len(next(iter(last.values())))
