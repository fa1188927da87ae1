"""Limits and arms to test the supervisor with."""

from __future__ import annotations

import numpy as np

from robot_drivers.driver import Measurement
from robot_drivers.limits import Box, JointLimits, Limits

HZ = 50.0
STEP = 1 / HZ


def two_joints(**options: object) -> Limits:
    """A quick joint and a slow one with little jerk."""
    quick = JointLimits("quick", -1.0, 1.5, velocity=3.0, acceleration=20.0, jerk=1000.0, lead=0.6, fastest=3.0)
    slow = JointLimits("slow", -0.2, 0.8, velocity=0.5, acceleration=2.0, jerk=30.0, lead=0.15, fastest=1.0)
    return Limits((quick, slow), HZ, **options)  # type: ignore[arg-type]


def so101(box: Box | None = None) -> Limits:
    """The SO-101's joints with rates that are made up."""
    ranges = {"shoulder_pan": 1.9, "shoulder_lift": 1.74, "elbow_flex": 1.69, "wrist_flex": 1.65, "wrist_roll": 2.7}
    joints = [JointLimits(name, -end, end, 2.0, 10.0, 400.0, 0.5, 5.0) for name, end in ranges.items()]
    gripper = JointLimits("gripper", 0.0, 1.0, 2.0, 20.0, 1000.0, 0.5, 5.0)
    return Limits((*joints, gripper), HZ, workspace=box)


def measured(position: object, captured: float, velocity: object = None) -> Measurement:
    speed = None if velocity is None else np.asarray(velocity, np.float64)
    return Measurement(np.asarray(position, np.float64), speed, captured)
