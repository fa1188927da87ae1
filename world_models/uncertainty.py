"""How much a model doubts its own guess, and how much doubt is usual: limits beyond which a dream ends.

The doubt is how far apart the places are where the robot may be next, weighed by how likely each is: a grasp that may
hold or slip.  It costs nothing.

The limits are calibrated on recorded episodes: a model replays recorded actions from recorded starts, deeper and deeper
into its own dream, and at every depth the limit is a quantile of the doubts it had.  So a known share of the dreams
that are like the recorded ones is ended at each depth, and more of those that are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vla_rl.contract.errors import UserError


def disagreement(candidates: Tensor, odds: Tensor) -> Tensor:
    """[B]: root mean square distance of the ``candidates`` [B,K,S] from their mean, weighed by log-odds [B,K,S]."""
    share = odds.exp()
    apart = candidates - (share * candidates).sum(1, keepdim=True)
    return (share * apart.square()).sum(1).mean(-1).sqrt()


@dataclass(frozen=True)
class Limits:
    """The highest usual doubt by depth: ``values[d]`` after ``d + 1`` calls; deeper than calibrated, the last."""

    values: tuple[float, ...]

    @classmethod
    def calibrate(cls, doubts: Sequence[np.ndarray], quantile: float = 0.95) -> Limits:
        """From the doubts [N_d] of held-out replays at every depth.

        The limit is the smallest of the doubts that at least ``quantile`` of them do not exceed, corrected for their
        number (split conformal: rank ceil((n + 1) q)); with too few of them to say, or a quantile of 1, it is infinite.
        """
        if not len(doubts) or not all(len(part) for part in doubts):
            raise UserError("a depth has no doubts to calibrate on, so no limit could be set; hold more episodes out.")
        if not 0.0 < quantile <= 1.0:
            raise UserError(f"a quantile of {quantile} leaves no limit; choose one above 0, up to 1.")
        return cls(tuple(_conformal(np.sort(np.asarray(part, float)), quantile) for part in doubts))

    def warn_beyond(self, horizon: int, frames: int) -> None:
        """A UserWarning when dreams of ``horizon`` control steps, ``frames`` in a call, go deeper than calibrated."""
        judged = len(self.values) * frames
        if judged < horizon:
            warnings.warn(
                f"a dream horizon of {horizon} control steps is beyond the {judged} that the model was judged for, so "
                "beyond that nobody knows how wrong dreams are and the last limit of doubt stands for all deeper ones; "
                f"take a horizon of at most {judged}, or calibrate on longer held-out episodes.",
                UserWarning,
                stacklevel=3,
            )

    def at(self, depth: np.ndarray) -> np.ndarray:
        """The limit [R] of calls at ``depth`` int [R], counted from 0."""
        limit: np.ndarray = np.asarray(self.values)[np.minimum(depth, len(self.values) - 1)]
        return limit


def _conformal(doubts: np.ndarray, quantile: float) -> float:
    rank = int(np.ceil((len(doubts) + 1) * quantile))
    return float(doubts[rank - 1]) if rank <= len(doubts) else float("inf")
