"""The forward kinematics of a Franka arm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Denavit and Hartenberg's parameters in Craig's form (a, d, alpha) of joints 1 to 7 and the flange, from Franka's
# documentation of its robot.
_DH = [
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -math.pi / 2),
    (0.0, 0.316, math.pi / 2),
    (0.0825, 0.0, math.pi / 2),
    (-0.0825, 0.384, -math.pi / 2),
    (0.0, 0.0, math.pi / 2),
    (0.088, 0.0, math.pi / 2),
    (0.0, 0.107, 0.0),
]


def hand_at(joints: Sequence[float], base: Sequence[float], turn: float) -> np.ndarray:
    """Pose of the hand [4,4] of an arm at ``base`` (x, y, z) that is turned by ``turn`` radians about the vertical."""
    cos, sin = math.cos(turn), math.sin(turn)
    pose = np.array([[cos, -sin, 0, 0], [sin, cos, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    pose[:3, 3] = base
    for (a, d, alpha), q in zip(_DH, [*joints, -math.pi / 4], strict=True):  # the hand is turned on the flange
        c, s, ca, sa = math.cos(q), math.sin(q), math.cos(alpha), math.sin(alpha)
        link = [[c, -s, 0, a], [s * ca, c * ca, -sa, -d * sa], [s * sa, c * sa, ca, d * ca], [0, 0, 0, 1]]
        pose = pose @ np.array(link)
    return pose
