"""What moves things on the tabletop: a robot with its scene, its state and its actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import mujoco
import numpy as np

from vla_rl.contract.env import Array, ArraySpec


class Robot(Protocol):
    """A robot over the cubes and marks of a table.

    ``start`` and ``displace`` work on one environment, on the host; ``control``, ``proprioception`` and ``opening`` on
    ``R`` environments at once, whose arrays are of numpy or of torch (``arrays.py``).
    """

    state: ArraySpec
    action: ArraySpec
    substeps: int  # physics steps per control step
    first_cube: int  # first entry of the first cube in ``qpos``

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The compiled scene, with geoms and bodies ``cube0``, ..., ``mark0``, ..., ``table`` and ``mat``."""

    def scatter(self, count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
        """``count`` places [count,2] in metres within reach, at least ``spacing`` (or [count,count]) apart."""

    def start(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put the robot, open, somewhere above the cubes, into ``qpos`` [nq]; returns the matching ``ctrl`` [nu]."""

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, values: Mapping[str, float]) -> None:
        """Shift the start in ``qpos`` and ``ctrl`` by the parameters "gripper_x", "gripper_y" and "gripper_z"."""

    def control(self, ctrl: Array, action: Array) -> Array:
        """The actuator targets [R,nu] after ``action`` [R,D], which is within bounds."""

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,S], within the bounds of ``state``."""

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the fingers."""
