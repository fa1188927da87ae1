"""Random draws of policies: on the host, so that a seed means the same on every device, then moved to the weights.

A batch is drawn from one generator, or from one per environment.  Evaluation gives every episode its own generator, so
what an episode draws does not depend on the number of environments, their order, or the episodes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.errors import ContractError


class RecordedNoise:
    """Stands for a generator: its normal draws are ``values``, in a replay of somebody's decisions."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.flatten()

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next draws, in the shape ``size``; raises ContractError when fewer were recorded."""
        count = math.prod(size)
        if count > len(self._values):
            raise ContractError(
                f"the policy draws {count} normal numbers for a decision and {len(self._values)} were recorded, so it "
                "would decide differently; record the noise of the whole chunk."
            )
        taken, self._values = self._values[:count], self._values[count:]
        return taken.reshape(*size).to(dtype)


Generators: TypeAlias = torch.Generator | Sequence[torch.Generator | RecordedNoise]
"""One generator for the whole batch, or one per environment."""


def normal(shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """N(0, 1) noise [B,...] of ``shape``, on the device and in the dtype of ``like``.

    It is drawn in float32, or in float64 where ``like`` is float64.  Raises ContractError unless a sequence holds one
    generator per environment.
    """
    return sent(_normal(shape, generator, like), like.device).to(like.dtype)


def normals(count: int, shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """What ``count`` calls of :func:`normal` return, [count,B,...], which goes to the device at once."""
    drawn = torch.stack([_normal(shape, generator, like) for _ in range(count)])
    return sent(drawn, like.device).to(like.dtype)


def _normal(shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """As :func:`normal`, where it is drawn."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def draw(size: Sequence[int], own: Any) -> Tensor:
        if isinstance(own, RecordedNoise):
            return own.take(size, dtype)
        return torch.randn(size, generator=own, device=own.device, dtype=dtype)

    return _draw(shape, generator, draw)


def uniform(shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """Uniform noise [B,...] within [0, 1) of ``shape``; device, dtype and errors as for :func:`normal`."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def draw(size: Sequence[int], own: Any) -> Tensor:
        return torch.rand(size, generator=own, device=own.device, dtype=dtype)

    return sent(_draw(shape, generator, draw), like.device).to(like.dtype)


def sent(drawn: Tensor, device: torch.device) -> Tensor:
    """``drawn`` on ``device``; the host does not wait until it has arrived there."""
    return drawn.to(device, non_blocking=device.type != "cpu")


def integers(high: int, shape: Sequence[int], generator: Generators) -> Tensor:
    """Uniform int64 [B,...] below ``high``, on the host; errors as for :func:`normal`."""
    return _draw(shape, generator, lambda size, g: torch.randint(high, size, generator=g, device=g.device)).cpu()


def generators_of(generator: Generators, env_ids: Tensor) -> Generators:
    """The generators of ``env_ids`` [R] of a batch; a single generator serves all environments."""
    return generator if isinstance(generator, torch.Generator) else [generator[i] for i in env_ids.cpu().tolist()]


def _draw(shape: Sequence[int], generator: Generators, draw: Callable[[Sequence[int], Any], Tensor]) -> Tensor:
    if isinstance(generator, torch.Generator):
        return draw(shape, generator)
    if len(generator) != shape[0]:
        raise ContractError(
            f"{len(generator)} generators were given for a batch of {shape[0]}, so environments would share "
            "their noise; give one generator, or one per environment."
        )
    return torch.stack([draw(shape[1:], own) for own in generator])
