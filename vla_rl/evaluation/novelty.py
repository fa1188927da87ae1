"""How much of what a policy does was never tried: the distance of its decisions to recorded ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.stats import Floats

_MOST = 4096  # recorded decisions that are kept: distances to more say no more
_QUANTILE = 0.99


@dataclass(frozen=True)
class Tried:
    """Recorded decisions, state and actions, in units of their standard deviations.

    ``limit``: 99 % of the recorded decisions have one of another episode that is nearer.
    """

    decisions: Floats  # [N,F]
    mean: Floats
    std: Floats
    limit: float

    @classmethod
    def of(cls, state: np.ndarray, chunk: np.ndarray, episode: np.ndarray) -> Tried:
        """From ``state`` [N,S], ``chunk`` [N,H,D] and ``episode`` int [N]; UserError for fewer than two episodes."""
        if len(np.unique(episode)) < 2:
            raise UserError(
                "the recorded decisions are of fewer than two episodes, so nobody can tell how much episodes differ; "
                "record more."
            )
        kept = np.unique(np.linspace(0, len(state) - 1, min(_MOST, len(state))).astype(np.int64))
        flat = _flat(state[kept], chunk[kept])
        mean, std = flat.mean(0), flat.std(0).clip(1e-6)
        decisions = (flat - mean) / std
        distance = _distances(decisions, decisions)
        distance[episode[kept][:, None] == episode[kept]] = np.inf
        return cls(decisions, mean, std, float(np.quantile(distance.min(1), _QUANTILE)))

    def left(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """bool [B]: which decisions, ``state`` [B,S] and ``chunk`` [B,H,D], are further from all recorded ones."""
        if not len(state):
            return np.zeros(0, bool)
        asked = (_flat(state, chunk) - self.mean) / self.std
        left: np.ndarray = _distances(asked, self.decisions).min(1) > self.limit
        return left


def _flat(state: np.ndarray, chunk: np.ndarray) -> Floats:
    """[N,S+H*D]"""
    parts = [np.asarray(one, np.float64).reshape(len(one), -1) for one in (state, chunk)]
    return np.concatenate(parts, 1)


def _distances(one: Floats, other: Floats) -> np.ndarray:
    """[B,N], relative to the square root of the number of entries."""
    found: np.ndarray = torch.cdist(torch.from_numpy(one), torch.from_numpy(other)).numpy() / one.shape[1] ** 0.5
    return found
