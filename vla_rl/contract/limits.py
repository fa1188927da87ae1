"""Checks of the numbers in configs."""

from __future__ import annotations

import math
from typing import Any

from vla_rl.contract.errors import UserError


def check_limits(config: Any, **limits: tuple[float, float]) -> None:
    """Raise UserError unless each named field of ``config`` lies within its (low, high), both included."""
    for name, (low, high) in limits.items():
        value = getattr(config, name)
        if not low <= value <= high:  # a NaN is refused as well
            allowed = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise UserError(
                f"{type(config).__name__}.{name} is {value}, which has no meaning; choose a number {allowed}."
            )


def check_positive(config: Any, *names: str) -> None:
    """Raise UserError unless the fields ``names`` of ``config`` are above 0; infinity is allowed, NaN is not."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise UserError(
                f"{type(config).__name__}.{name} is {value}, which has no meaning; choose a number above 0."
            )


# What no network here has, and a config of somebody else's may: it would fill the memory.
_SIZES = {"horizon": 10_000, "width": 10_000, "condition": 10_000, "queries": 1000, "depth": 100, "blocks": 100}


def check_sizes(config: Any, *names: str) -> None:
    """Raise UserError unless the fields ``names`` of ``config`` are sizes that a network may have, from 1 on."""
    check_limits(config, **{name: (1, _SIZES[name]) for name in names})


def check_ordered(config: Any, *names: str) -> None:
    """Raise UserError unless the fields ``names`` of ``config`` are None or pairs (lower, upper)."""
    for name in names:
        pair = getattr(config, name)
        if pair is not None and not pair[0] <= pair[1]:
            raise UserError(
                f"{type(config).__name__}.{name} is {pair}, so no number lies between them; give the lower bound first."
            )


def check_choice(config: Any, name: str, *choices: str) -> None:
    """Raise UserError unless the field ``name`` of ``config`` is one of ``choices``."""
    value = getattr(config, name)
    if value not in choices:
        allowed = " or ".join(map(repr, choices))
        raise UserError(f"{type(config).__name__}.{name} is {value!r}, which has no meaning; choose {allowed}.")
