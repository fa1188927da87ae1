"""Between physical units and network inputs or outputs: by bounds, by fixed and by running statistics.

Their numbers are in the checkpoint.  Normalised actions may be relative: ``action = predicted + state`` of the moment
of the decision, for all actions of a chunk, as by openpi's ``DeltaActions`` and LeRobot's
``RelativeActionsProcessorStep``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
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


ORIGIN = "action_origin"  # among features where actions are relative: float [B,D], what they are relative to
Relative = tuple[bool, ...]
"""Which entries of an action are relative to the same entries of the state; () where none is."""


def origin(relative: Relative, state: Tensor) -> dict[str, Tensor]:
    """The feature ``ORIGIN`` of physical ``state`` [B,S]: 0 in entries that are absolute; {} where all are."""
    if not any(relative):
        return {}
    chosen = Affine((0.0,) * len(relative), tuple(map(float, relative)))
    return {ORIGIN: chosen.unnormalize(state[..., : len(relative)].float())}


def origin_of(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``ORIGIN`` of ``features``, if it is there."""
    return {ORIGIN: features[ORIGIN]} if ORIGIN in features else {}


def made_absolute(features: Mapping[str, Tensor], actions: Tensor) -> Tensor:
    """Un-normalised ``actions`` [B,H,D] of a decision on ``features``, as they are executed but for the bounds."""
    return actions + features[ORIGIN][:, None].to(actions) if ORIGIN in features else actions


def made_relative(features: Mapping[str, Tensor], actions: Tensor) -> Tensor:
    """The inverse of :func:`made_absolute`: executed ``actions`` [B,H,D] as a decision on ``features`` makes them."""
    return actions - features[ORIGIN][:, None].to(actions) if ORIGIN in features else actions


def check_relative(relative: Relative, spec: EnvSpec) -> None:
    """Raise ContractError where actions of ``spec`` cannot be relative to its state."""
    if not any(relative):
        return
    size, state = spec.action_dim, spec.state
    if len(relative) != size or state.shape[-1] < size:
        raise ContractError(
            f"{len(relative)} entries are said to be relative to the state or not, but environment {spec.name!r} has "
            f"actions of {size} numbers and states of {state.shape[-1]}, so they would be added to something else; "
            "relative needs one true or false for every entry of the action, and a state that begins with the same."
        )
    for i, name in enumerate(spec.action.names):
        if relative[i] and name in state.names and state.names[i] != name:
            raise ContractError(
                f"entry {i} of an action of {spec.name!r} is {name!r} but that of its state {state.names[i]!r}, so it "
                "would be relative to something else; order them alike, or use absolute actions."
            )


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


_CLIP = 10.0  # standard deviations; inputs far from all data so far must not blow up the network
_EPSILON = 1e-8  # added to the variance; a constant entry becomes 0


class FixedStandardizer(nn.Module):
    """``Affine`` as a module; ``observe`` changes nothing."""

    offset: Tensor
    scale: Tensor

    def __init__(self, affine: Affine) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(affine.offset, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.tensor(affine.scale, dtype=torch.float64), persistent=False)

    def forward(self, physical: Tensor) -> Tensor:
        return (physical - self.offset.to(physical)) / self.scale.to(physical)

    def observe(self, physical: Tensor, reducer: Reducer) -> None:
        pass


@dataclass(frozen=True)
class RunningStatistics:
    """Config: standardise a vector of ``size`` entries by a :class:`RunningStandardizer`."""

    size: int


class RunningStandardizer(nn.Module):
    """``(x - mean) / std`` clipped to +-10, with mean and population std (float64) of everything observed.

    The statistics are merged exactly (Chan, Golub, LeVeque 1979).  Only :meth:`observe` changes them, and a learner
    calls it after its update: acting and learning use the same statistics in between, so ratios start at 1.  They are
    parameters without gradient, so that they are published, saved and restored with the weights.  Before the first
    ``observe`` the module is the identity, up to the clipping.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(size, dtype=torch.float64), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(size, dtype=torch.float64), requires_grad=False)

    def forward(self, physical: Tensor) -> Tensor:
        scale = (self.variance + _EPSILON).rsqrt()
        # Subtract in float64: for values far from 0, float32 would lose most digits.
        standard = (physical - self.mean) * scale
        return standard.clamp(-_CLIP, _CLIP).to(physical.dtype)

    @torch.no_grad()
    def observe(self, physical: Tensor, reducer: Reducer) -> None:
        """Merge the statistics of all processes' ``physical``, [B,S] in this one."""
        values = physical.double()
        fresh = reducer.sum(torch.tensor(float(len(values)), dtype=torch.float64, device=values.device))
        mean = reducer.sum(values.sum(0)) / fresh
        squares = reducer.sum((values - mean).square().sum(0))
        total, gap = self.count + fresh, mean - self.mean
        squares = squares + self.variance * self.count + gap.square() * self.count * fresh / total
        self.mean.copy_(self.mean + gap * fresh / total)
        self.variance.copy_(squares / total)
        self.count.copy_(total)


def build_standardizer(by: Affine | RunningStatistics) -> FixedStandardizer | RunningStandardizer:
    """The module for a config."""
    return FixedStandardizer(by) if isinstance(by, Affine) else RunningStandardizer(by.size)
