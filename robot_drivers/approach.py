"""A slow way from where an arm is to where it should begin."""

from __future__ import annotations

import math

import numpy as np


def approach(start: np.ndarray, goal: np.ndarray, velocity: np.ndarray, control_dt: float) -> np.ndarray:
    """Positions [H,D], one for each control step of ``control_dt`` seconds, on the straight line in joint space.

    All joints ([D] each) arrive together, in the last of H >= 1 steps, which is ``goal``, and none is faster than its
    ``velocity`` per second.
    """
    share = float(np.max(np.abs(goal - start) / velocity)) / control_dt  # control steps of the joint that takes longest
    steps = max(1, math.ceil(share - 1e-9))
    way: np.ndarray = start + np.arange(1, steps + 1)[:, None] / steps * (goal - start)
    way[-1] = goal
    return way
