"""Affine normalisation between physical units and network inputs or outputs; its numbers are in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError


@dataclass(frozen=True)
class Affine:
    """``normalized = (physical - offset) / scale``, one number per entry of the last axis."""

    offset: tuple[float, ...]
    scale: tuple[float, ...]

    @classmethod
    def from_bounds(cls, spec: ArraySpec) -> Affine:
        """Map the bounds of ``spec`` to [-1, 1]; raises ContractError where there is no range between them."""
        size = spec.shape[-1]
        low, high = _per_entry(spec.low, size), _per_entry(spec.high, size)
        for i, (a, b) in enumerate(zip(low, high, strict=True)):
            if not 0 < b - a < math.inf:
                raise ContractError(
                    f"entry {i} is declared within [{a}, {b}], so it cannot be mapped to [-1, 1]; declare finite "
                    "bounds low < high, or normalize by statistics of data."
                )
        return cls(
            tuple((a + b) / 2 for a, b in zip(low, high, strict=True)),
            tuple((b - a) / 2 for a, b in zip(low, high, strict=True)),
        )

    @classmethod
    def from_data(cls, values: Tensor, minimum_scale: float = 1e-3) -> Affine:
        """Zero mean and unit variance over all but the last axis; a constant entry keeps ``minimum_scale``."""
        flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1]).double()
        std = flat.std(0, correction=min(1, len(flat) - 1))
        return cls(tuple(flat.mean(0).tolist()), tuple(std.clamp_min(minimum_scale).tolist()))

    def normalize(self, physical: Tensor) -> Tensor:
        """Physical [...,N] -> normalised [...,N]."""
        offset, scale = _constants(self, physical.dtype, physical.device)
        return (physical - offset) / scale

    def unnormalize(self, normalized: Tensor) -> Tensor:
        """Normalised [...,N] -> physical [...,N]."""
        offset, scale = _constants(self, normalized.dtype, normalized.device)
        return normalized * scale + offset


def _constants(affine: Affine, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Offset and scale [N], made once per device; on "meta" every time, since such tensors belong to one estimate."""
    return _make_constants(affine, dtype, device) if device.type == "meta" else _kept_constants(affine, dtype, device)


def _make_constants(affine: Affine, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(affine.offset, dtype=dtype).to(device), torch.tensor(affine.scale, dtype=dtype).to(device)


_kept_constants = lru_cache(maxsize=256)(_make_constants)


def check_same_env(trained: EnvSpec, given: EnvSpec) -> None:
    """Raise ContractError when a policy trained for ``trained`` cannot act in ``given``.

    Cameras, state and action must agree in shape, bounds and unit; the task table may have grown.
    """
    for part in ("images", "state", "action", "control_dt"):
        expected, found = getattr(trained, part), getattr(given, part)
        if expected != found:
            raise ContractError(
                f"the checkpoint was trained for {part} {_describe(expected)} but environment {given.name!r} has "
                f"{_describe(found)}, so its inputs or outputs would be misread; use the environment options it was "
                "trained with."
            )
    if given.tasks[: len(trained.tasks)] != trained.tasks:
        raise ContractError(
            f"the checkpoint's task table is {list(trained.tasks)} but that of environment {given.name!r} starts with "
            f"{list(given.tasks[: len(trained.tasks)])}, so task numbers would be mixed up; only append to the table."
        )


def _describe(part: object) -> str:
    if isinstance(part, dict):
        return "{" + ", ".join(f"{name}: {_describe(item)}" for name, item in part.items()) + "}"
    return f"{part.dtype}{list(part.shape)} in [{part.low}, {part.high}]" if isinstance(part, ArraySpec) else str(part)


def _per_entry(bound: float | Sequence[float], size: int) -> tuple[float, ...]:
    return (float(bound),) * size if isinstance(bound, int | float) else tuple(float(item) for item in bound)


def action_limits(spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """Lowest and highest action [D] in physical units; raises ContractError for discrete actions."""
    if spec.discrete:
        raise ContractError(
            f"the actions of {spec.name!r} are discrete, so a policy for physical quantities cannot choose them; use "
            "vla_rl.policies.feed_forward:CategoricalPolicy, which PPO and GRPO train."
        )
    return (
        torch.tensor(_per_entry(spec.action.low, spec.action_dim)),
        torch.tensor(_per_entry(spec.action.high, spec.action_dim)),
    )
