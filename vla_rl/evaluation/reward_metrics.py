"""How well the rewards of imagined rollouts follow the recorded ones of the same actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RewardAgreement:
    """Predicted and recorded rewards of the call that ends after ``horizon`` calls, over the ``replays`` that have it.

    ``correlation`` is Pearson's, None where fewer than three replays remain or one side is constant: what equals itself
    everywhere ranks nothing.  ``error`` is the root mean square error, ``spread`` the standard deviation of what was
    recorded, which is the error of the best constant.
    """

    horizon: int
    replays: int
    correlation: float | None
    error: float
    spread: float


def reward_agreement(
    predicted: np.ndarray, recorded: np.ndarray, calls: np.ndarray, horizons: Sequence[int]
) -> tuple[RewardAgreement, ...]:
    """``predicted`` and ``recorded`` float [n,K]: rewards of each call; ``calls`` [n]: how many are whole.

    Replays whose recording has no rewards (NaN) are left out.
    """
    results = []
    for horizon in horizons:
        kept = (calls >= horizon) & np.isfinite(recorded[:, horizon - 1])
        one, other = predicted[kept, horizon - 1].astype(float), recorded[kept, horizon - 1].astype(float)
        if len(one):
            correlation = _correlation(one, other)
            error = float(np.sqrt(np.square(one - other).mean()))
            results.append(RewardAgreement(horizon, len(one), correlation, error, float(other.std())))
    return tuple(results)


def _correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])
