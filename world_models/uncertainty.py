"""Uncertainty of a model's prediction, and limits beyond which an imagined rollout ends.

The uncertainty is, without an additional forward pass, one of two:

    state     the spread of the modes of the robot's next state, weighted by their probabilities: large for a grasp that
              may hold or slip
    pictures  how much the last denoising step changes the first one's estimate of the picture: for tasks without
              proprioception that would tell

On lift the first finds hallucinated successes (AUROC .88 among imagined ones) and the second does not (.46); the second
follows the error of pictures (rank correlation .37 to .67 by depth) and the first hardly does (.23 to .30).

The limits are calibrated on recorded episodes: the model replays recorded actions from recorded initial states, and at
every depth (number of calls) the limit is a quantile of the uncertainties it had.  So a known share of rollouts like
the recorded ones is truncated at each depth, and more of those that differ from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vla_rl.contract.errors import UserError


def disagreement(modes: Tensor, log_probs: Tensor) -> Tensor:
    """[B]: root mean square distance of ``modes`` [B,K,S] from their mean, weighted by ``log_probs`` [B,K,S]."""
    share = log_probs.exp()
    apart = modes - (share * modes).sum(1, keepdim=True)
    return (share * apart.square()).sum(1).mean(-1).sqrt()


def revision(first: Tensor, last: Tensor) -> Tensor:
    """[B]: root mean square difference of two estimates [B,c,y,x] of the same latents."""
    return (last - first).float().square().mean((1, 2, 3)).sqrt()


@dataclass(frozen=True)
class Limits:
    """The highest accepted uncertainty by depth: ``values[d]`` after ``d + 1`` calls, the last one beyond them."""

    values: tuple[float, ...]

    @classmethod
    def calibrate(cls, uncertainties: Sequence[np.ndarray], quantile: float = 0.95) -> Limits:
        """From the uncertainties [N_d] of held-out replays at every depth.

        The limit is the smallest uncertainty that at least ``quantile`` of them do not exceed, corrected for their
        number (split conformal: rank ceil((n + 1) q)); with too few of them, or a quantile of 1, it is infinite.

        Raises UserError for a depth without replays and for a quantile outside (0, 1].
        """
        if not len(uncertainties) or not all(len(part) for part in uncertainties):
            raise UserError(
                "a depth has no uncertainties to calibrate on, so no limit could be set; hold more episodes out."
            )
        if not 0.0 < quantile <= 1.0:
            raise UserError(f"a quantile of {quantile} leaves no limit; choose one above 0, up to 1.")
        return cls(tuple(_conformal(np.sort(np.asarray(part, float)), quantile) for part in uncertainties))

    def warn_beyond(self, horizon: int, frames: int) -> None:
        """A UserWarning when rollouts of ``horizon`` control steps, ``frames`` in a call, go deeper than calibrated."""
        calibrated = len(self.values) * frames
        if calibrated < horizon:
            warnings.warn(
                f"a horizon of {horizon} control steps is beyond the {calibrated} that the limits of uncertainty were "
                "calibrated for, so beyond that the error of imagined rollouts is unknown and the last limit stands "
                f"for all deeper calls; take a horizon of at most {calibrated}, or calibrate on longer held-out "
                "episodes.",
                UserWarning,
                stacklevel=3,
            )

    def at(self, depth: np.ndarray) -> np.ndarray:
        """The limit [R] of calls at ``depth`` int [R], counted from 0."""
        limit: np.ndarray = np.asarray(self.values)[np.minimum(depth, len(self.values) - 1)]
        return limit


def _conformal(uncertainties: np.ndarray, quantile: float) -> float:
    rank = int(np.ceil((len(uncertainties) + 1) * quantile))
    return float(uncertainties[rank - 1]) if rank <= len(uncertainties) else float("inf")
