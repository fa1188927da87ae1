"""The usable decisions of a rollout as one flat batch, its minibatches and micro-batches; gradients of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.tracker import is_shard


@dataclass(frozen=True)
class Decisions:
    """The usable decisions of a rollout, flattened to [B]: neither idle nor intervened nor too old.

    ``age`` int [B] counts the updates between the policy that acted and the learner's; ``valid`` bool [B,H] says which
    actions were executed.  ``logprob`` is [B] or [B,G], the log-probs of G parts; the policy's loss is the mean over
    decisions of ``weight * l``, summed over parts, with ``weight`` float [B] or [B,G] (``policy_gradient.py``).
    """

    features: Mapping[str, Tensor]
    sample: Tensor
    aux: Mapping[str, Tensor]
    logprob: Tensor
    advantage: Tensor
    weight: Tensor
    age: Tensor
    valid: Tensor


B = TypeVar("B", bound=Decisions)


class Gathered(Mapping[str, Tensor]):
    """Entries of a rollout's features {name: [T+1,E,...]}, as {name: [B,...]} when read.

    Features are most of a learner's memory, so an entry is copied when a network reads it, and then for a micro-batch.
    """

    def __init__(self, features: Mapping[str, Tensor], index: Tensor) -> None:
        """``features`` {name: [(T+1)E,...]}, of which ``index`` int [B] are read."""
        self._features, self._index = features, index

    @classmethod
    def where(cls, features: Mapping[str, Tensor], mask: Tensor) -> Gathered:
        """The features where ``mask`` [T,E], in the order of :func:`flatten`."""
        env, step = mask.T.nonzero(as_tuple=True)
        flat = {name: item.flatten(0, 1) for name, item in features.items()}  # views of what a window has written
        return cls(flat, step * mask.shape[1] + env)

    def __getitem__(self, name: str) -> Tensor:
        return rows(self._features[name], self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def select(self, index: Tensor) -> Gathered:
        """Those of the decisions at ``index``, without a copy."""
        return Gathered(self._features, rows(self._index, index))


def ages(rollout: Rollout, version: int) -> Tensor:
    """int [T,E]: by how many updates every decision is older than the learner's ``version``.

    Raises ContractError for a decision of a version that the learner has not reached.
    """
    age: Tensor = version - rollout.version
    active = rollout.valid.any(-1)
    if (age[active] < 0).any():
        raise ContractError(
            f"a decision was made by policy version {int(rollout.version[active].max())} but the learner has version "
            f"{version}, so its age is unknown; set the learner's policy.version to what publish returns, and resume "
            "learner and source from the same state."
        )
    return age


def flatten(item: Tensor, mask: Tensor) -> Tensor:
    """The entries of ``item`` [T,E,...] where ``mask`` [T,E], as [B,...], one environment after the other.

    In this order, several processes have the same batch as one process with all environments.
    """
    return item.transpose(0, 1)[mask.T]


def select(batch: B, index: Tensor) -> B:
    """The decisions at ``index``, in its order."""
    parts: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: _selected(item, index) for name, item in parts.items()})


def _selected(item: Any, index: Tensor) -> Any:
    if isinstance(item, Gathered):
        return item.select(index)
    return select_each(item, index) if isinstance(item, Mapping) else rows(item, index)


def select_each(items: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Every tensor at ``index``."""
    return {name: rows(item, index) for name, item in items.items()}


def rows(item: Tensor, index: Tensor) -> Tensor:
    """``item[index]`` for ``index`` int or bool [N], for which torch takes two to three times as long."""
    chosen = index.nonzero().flatten() if index.dtype == torch.bool else index
    return item.index_select(0, chosen.to(item.device))


def micro_batches(size: int, micro_batch: int) -> Iterator[tuple[Tensor | None, float]]:
    """Parts of ``size`` decisions with at most ``micro_batch`` each (0: one part), and their shares of the whole.

    A part is an index tensor, or None for all decisions; without decisions there is no part.
    """
    if not micro_batch or size <= micro_batch:
        yield from [(None, 1.0)] if size else []
        return
    for part in torch.arange(size).split(micro_batch):
        yield part, len(part) / size


def mean_gradients(reducer: Reducer, parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all processes; a missing gradient counts as zero."""
    if reducer.size == 1:
        return
    trained = list(parameters)
    reducer.sum_gradients(trained)
    for parameter in trained:
        assert parameter.grad is not None  # the sum gives one to all
        parameter.grad /= reducer.size


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``bound``; returns the norm before.

    A gradient that is a DTensor counts as the whole of its shards, with every process's.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    shards = [parameter for parameter in trained if is_shard(parameter.grad)]
    if not shards:
        return nn.utils.clip_grad_norm_(trained, bound)
    whole = [parameter for parameter in trained if not is_shard(parameter.grad)]
    parts = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in (shards, whole) if part]
    norm = torch.linalg.vector_norm(torch.stack([full(part) for part in parts]))
    for part in (shards, whole):
        nn.utils.clip_grads_with_norm_(part, bound, norm)
    return norm


def full(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of which it is a shard; then all processes have to ask."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether all of ``tensor`` is finite, or of this process's shard of it."""
    own = tensor.to_local() if is_shard(tensor) else tensor
    return bool(own.isfinite().all())


def mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over the items that have it."""
    names = sorted({name for item in metrics for name in item})
    values = {name: [item[name] for item in metrics if name in item] for name in names}
    return {name: sum(items) / len(items) for name, items in values.items()}
