"""Demonstrations as if a policy's decisions had been executed to their end: what RECAP's returns are counted in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import DEMONSTRATED
from vla_rl.contract.batch import Rollout
from vla_rl.experience.columns import side_by_side
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.recipes.imitation import encode_episodes


def recorded_rollout(policy: FlowPolicy, episodes: Demonstrations) -> Rollout:
    """The successful ``episodes`` as columns: each ``H`` times, with chunks that begin at its step 0, 1, ... ``H - 1``.

    So every control step begins a decision, as in imitation, and the decisions of a column follow each other.
    """
    features = encode_episodes(policy, episodes)
    chunks, columns = episodes.chunks(policy.horizon), []
    for begin, end in episodes.spans():
        for first in range(begin, min(begin + policy.horizon, end)):
            index = np.arange(first, end, policy.horizon)
            columns.append(_column(features, chunks, index, end, int(episodes.task[begin])))
    return side_by_side(columns)


def _column(features: dict[str, Tensor], chunks: np.ndarray, index: np.ndarray, end: int, task: int) -> Rollout:
    length, horizon = len(index), chunks.shape[1]
    last = torch.zeros(length, 1, dtype=torch.bool)
    last[-1] = True
    valid = torch.as_tensor(index[:, None] + np.arange(horizon) < end)[:, None]
    actions = torch.as_tensor(chunks[index])[:, None]
    kept = {name: item[[*index.tolist(), int(index[-1])]][:, None] for name, item in features.items()}
    whole = torch.zeros(length, 1, dtype=torch.long)
    return Rollout(
        features=kept,
        sample=actions,
        executed=actions,
        aux={},
        logprob=torch.zeros(length, 1),
        reward=torch.zeros(length, 1, horizon),
        valid=valid,
        intervened=torch.zeros_like(valid),
        terminated=last,
        truncated=torch.zeros_like(last),
        success=last,
        version=whole + DEMONSTRATED,
        final_index=torch.zeros(0, 2, dtype=torch.long),
        final_features={name: item[:0, 0] for name, item in kept.items()},
        seeds=whole - 1,
        task=whole + task,
        robot="demonstrations",
    )
