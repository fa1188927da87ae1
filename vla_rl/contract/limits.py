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
