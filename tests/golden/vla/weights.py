"""Weights and inputs by a rule, so that golden files hold outputs only.  Needs numpy alone: other libraries run it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np


def generator(name: str) -> np.random.Generator:
    """The stream that belongs to a name."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """The float32 tensor of this public name: sizes that keep activations near 1 and make attention choose."""
    draw = generator(name).standard_normal(tuple(shape))
    if len(shape) > 1:
        fan_in = math.prod(shape[1:])
        return (draw / math.sqrt(fan_in)).astype(np.float32)
    return (draw * 0.1 + (1.0 if name.endswith("weight") else 0.0)).astype(np.float32)
