"""How much memory MuJoCo-Warp's arrays take."""

from __future__ import annotations

import dataclasses
from typing import Any

import warp as wp


def allocated(data: Any) -> int:
    """Bytes of all arrays of a dataclass, those of nested ones included."""
    total = 0
    for item in dataclasses.fields(data):
        value = getattr(data, item.name)
        if isinstance(value, wp.array):
            total += value.capacity
        elif dataclasses.is_dataclass(value):
            total += allocated(value)
    return total
