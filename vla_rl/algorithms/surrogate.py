"""The surrogate loss of a minibatch: every part of a likelihood has an importance ratio of its own.

A policy gives the log-prob of its chunk, [B], or those of G parts, [B,G], whose sum is that of the chunk: G = H for
actions, G = H*D for tokens (RLinf-VLA, arXiv 2510.06710; SimpleVLA-RL, arXiv 2509.09674).  Each part has the advantage
of its decision, and is clipped by itself:

    L = -mean_b sum_g m_bg w_bg l(rho_bg, A_b),    rho_bg = exp(log pi_bg - log pi_old,bg)

``m`` is 0 for the parts of actions that were not executed because the episode had ended inside the chunk.  They do not
influence the reward, so the gradient stays that of the return where parts are independent or each depends on earlier
ones only.  At ``rho = 1`` the gradient of a chunk that was executed whole is ``A grad log pi`` for every G, so clip
bounds change with G, but learning rate, gradient norm and entropy weight keep their meaning.

Deviation: both papers divide by the number of valid parts in a minibatch (token-mean), which is this loss times a
constant.  Dividing by each decision's own number would weight its parts by how early the episode ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from vla_rl.algorithms.decisions import Decisions
from vla_rl.contract.errors import ContractError

Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def surrogate(minibatch: Decisions, logprob: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """The loss, and the clipped share of every decision's parts [B].

    ``logprob`` [B] or [B,G] is that of the present policy.  ``objective`` gives from ratios [B,G] and advantages [B,1]
    the value to maximise and where it was clipped, both [B,G].

    Raises ContractError when the parts cannot be assigned to actions.
    """
    executed = executed_parts(minibatch.valid, minibatch.logprob)
    log_ratio = torch.where(executed, _columns(logprob) - _columns(minibatch.logprob), 0.0)
    value, clipped = objective(log_ratio.exp(), minibatch.advantage[:, None])
    value = torch.where(executed, _columns(minibatch.weight) * value, 0.0)
    return -value.sum(1).mean(), torch.where(executed, clipped, 0.0).sum(1) / executed.sum(1)


def executed_parts(valid: Tensor, logprob: Tensor) -> Tensor:
    """bool [B,G]: which parts of ``logprob`` [B] (then G = 1) or [B,G] belong to executed actions, ``valid`` [B,H].

    Raises ContractError unless every action has equally many parts.
    """
    if logprob.ndim == 1:
        return torch.ones_like(logprob, dtype=torch.bool)[:, None]
    parts, horizon = logprob.shape[1], valid.shape[1]
    if parts % horizon:
        raise ContractError(
            f"a likelihood has {parts} parts but a chunk {horizon} actions, so it is unknown which parts belong to "
            "actions that were not executed; give one number for the chunk, or equally many for every action."
        )
    return valid.repeat_interleave(parts // horizon, 1)


def joint(logprob: Tensor) -> Tensor:
    """The log-prob [B] of the chunk from ``logprob`` [B] or from its parts [B,G]."""
    return logprob if logprob.ndim == 1 else logprob.sum(1)


def for_parts(values: Tensor, logprob: Tensor) -> Tensor:
    """``values`` [B] in a shape that broadcasts with ``logprob`` [B] or [B,G]."""
    return values if logprob.ndim == 1 else values[:, None]


def _columns(values: Tensor) -> Tensor:
    """``values`` [B] as [B,1]; [B,G] as it is."""
    return values[:, None] if values.ndim == 1 else values
