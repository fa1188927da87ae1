"""Gradients of several processes: their mean, their norm where processes hold shards or the whole, clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.tracker import is_shard


def mean_gradients(reducer: Reducer, parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes; a missing gradient counts as zero."""
    if reducer.size == 1:
        return
    trained = list(parameters)
    reducer.sum_gradients(trained)
    for parameter in trained:
        assert parameter.grad is not None  # the sum gives one to all
        parameter.grad /= reducer.size


def fused_on_gpu(parameters: Iterable[nn.Parameter]) -> bool | None:
    """torch.optim's ``fused`` for ``parameters``: one kernel for all of them on a GPU, elsewhere torch's own choice."""
    return True if all(parameter.is_cuda for parameter in parameters) else None


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> float:
    """Scale all gradients so that their joint 2-norm is at most ``bound``; returns the norm before.

    A gradient that is a DTensor counts as the whole of its shards, with every process's.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    shards = [parameter for parameter in trained if is_shard(parameter.grad)]
    if not shards:
        return float(nn.utils.clip_grad_norm_(trained, bound))
    whole = [parameter for parameter in trained if not is_shard(parameter.grad)]
    parts = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in (shards, whole) if part]
    norm = torch.linalg.vector_norm(torch.stack([full(part) for part in parts]))
    for part in (shards, whole):
        nn.utils.clip_grads_with_norm_(part, bound, norm)
    return float(norm)


def full(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of which it is a shard; then all processes have to ask."""
    whole: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor
    return whole


def is_finite(tensor: Tensor) -> bool:
    """Whether all of ``tensor`` is finite, or of this process's shard of it."""
    own = tensor.to_local() if is_shard(tensor) else tensor
    return bool(own.isfinite().all())
