"""Advantages of chunked decisions (a semi-Markov decision process): GAE with true durations, and global normalisation.

Shapes: ``T`` decisions, ``E`` environments, ``H`` actions in a chunk.  Equations: Schulman et al., arXiv 1506.02438,
with the duration of a decision, its number of valid actions ``n``, in the discount (Sutton, Precup, Singh 1999).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.batch import Reducer

LambdaPer: TypeAlias = Literal["decision", "action"]


def chunk_reward(reward: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """``R = sum_i gamma^i r_i`` over the valid actions and ``n``, their number; [...,H] -> float64 and int64 [...].

    Rewards where ``valid`` is False are ignored, NaN included.
    """
    exponent = (valid.long().cumsum(-1) - 1).clamp(min=0).double()
    masked = torch.where(valid, reward.double(), 0.0)
    return (torch.pow(gamma, exponent) * masked).sum(-1), valid.sum(-1)


def gae(
    reward: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: float,
    lam: float,
    lambda_per: LambdaPer,
) -> tuple[Tensor, Tensor]:
    """Advantage and return, both [T,E] in the dtype of ``value``; computed in float64.

    reward, valid         [T,E,H]  valid is False for actions that were not executed
    terminated, truncated bool [T,E]  the episode ended at this decision; if both, terminated wins
    value                 [T,E]    V of the observation of the decision
    next_value            [T,E]    V of the observation after the decision (at the end of an episode its last one, not
                                   the first one of the next); ignored where terminated
    gamma                 discount per low-level action
    lam                   per decision, or per low-level action (then ``lam^n``), as ``lambda_per`` says

    ``delta = R + gamma^n V_next - V`` and ``A_j = delta_j + gamma^n lam A_{j+1}``, cut at the end of an episode.
    A decision without valid actions has advantage 0 and is skipped; its end flag still separates two episodes.
    """
    chunk, count = chunk_reward(reward, valid, gamma)
    discount = torch.pow(gamma, count.double())
    decay = torch.pow(lam, count.double()) if lambda_per == "action" else torch.full_like(discount, lam)
    bootstrap = torch.where(terminated, 0.0, next_value.double())
    delta = chunk + discount * bootstrap - value.double()
    ended = terminated | truncated
    advantage = _accumulate(delta, torch.where(ended, 0.0, discount * decay), count > 0, ended)
    return advantage.to(value.dtype), (advantage + value.double()).to(value.dtype)


def _accumulate(delta: Tensor, carry: Tensor, live: Tensor, ended: Tensor) -> Tensor:
    """``A_j = delta_j + carry_j A_{j+1}`` over the live decisions, 0 at the others, all [T,E]."""
    advantage = torch.zeros_like(delta)
    next_advantage = torch.zeros_like(delta[0])
    for j in reversed(range(delta.shape[0])):
        skipped = torch.where(ended[j], 0.0, next_advantage)
        next_advantage = torch.where(live[j], delta[j] + carry[j] * next_advantage, skipped)
        advantage[j] = torch.where(live[j], next_advantage, 0.0)
    return advantage


def normalize(advantage: Tensor, mask: Tensor, reducer: Reducer) -> Tensor:
    """``(A - mean) / (std + 1e-8)`` where ``mask``, 0 elsewhere; same shape and dtype as ``advantage``.

    Mean and population std are over all processes, summed in float64 in two passes, so that the result does not depend
    on their number.
    """
    values = torch.where(mask, advantage.double(), 0.0)
    total, count = reducer.sum(torch.stack([values.sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1.0)
    centred: Tensor = torch.where(mask, values - mean, 0.0)
    std: Tensor = (reducer.sum(centred.square().sum()) / count.clamp(min=1.0)).sqrt()
    return (centred / (std + 1e-8)).to(advantage.dtype)
