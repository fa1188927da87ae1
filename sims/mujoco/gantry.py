"""The gantry: a gripper that slides along three axes above the table."""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
from array_api_compat import array_namespace, device

from sims.mujoco.arrays import Constant
from sims.mujoco.scene import (
    CUBES_QPOS,
    FINGER_OPEN,
    FINGER_QPOS,
    GANTRY_QPOS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    build_model,
)
from vla_rl.contract.env import Array
from vla_rl.contract.spec import ArraySpec

SPREAD = 0.13  # metres; objects start within +-SPREAD in x and y
START = 0.12  # metres; the gripper starts within +-START in x and y
MOST_DISPLACEMENT = 0.03  # metres per control step and axis
_LOW, _HIGH = Constant(WORKSPACE_LOW), Constant(WORKSPACE_HIGH)


class Gantry:
    """Its actions displace the position target and open or close the fingers (``sims.mujoco.robot.Robot``)."""

    substeps = 12
    first_cube = CUBES_QPOS

    def __init__(self) -> None:
        low, high, gap = tuple(WORKSPACE_LOW.tolist()), tuple(WORKSPACE_HIGH.tolist()), 2 * FINGER_OPEN
        around = 0.02  # metres by which the gantry may overshoot its target or be pushed off it
        self.state = ArraySpec(
            (8,),
            "float32",
            low=(*(x - around for x in low), -0.01, *low, 0.0),
            high=(*(x + around for x in high), gap + 0.01, *high, gap),
            unit="m",
            frame="table",
            names=("x", "y", "z", "opening", "target_x", "target_y", "target_z", "target_opening"),
        )
        self._state_low, self._state_high = (Constant(x, np.float32) for x in (self.state.low, self.state.high))
        bound, names = (MOST_DISPLACEMENT,) * 3 + (1.0,), ("dx", "dy", "dz", "grip")
        lowest = tuple(-b for b in bound)
        self.action = ArraySpec((4,), "float32", lowest, bound, unit="m,m,m,1", frame="table", names=names)

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The scene of ``scene.py``."""
        return build_model(cubes, marks)

    def scatter(self, count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
        """``count`` places [count,2] in metres within ``SPREAD``, at least ``spacing`` (or [count,count]) apart."""
        return scatter(count, spacing, rng)

    def start(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put the open gripper somewhere above the cubes, into ``qpos``; returns the matching ``ctrl`` [nu]."""
        start = np.array([*rng.uniform(-START, START, 2), rng.uniform(0.07, 0.15)])
        qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = start, FINGER_OPEN
        return np.array([*start, FINGER_OPEN])

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, values: Mapping[str, float]) -> None:
        """Shift the gripper's start within its workspace."""
        moved = qpos[GANTRY_QPOS] + np.array([values[f"gripper_{axis}"] for axis in "xyz"])
        qpos[GANTRY_QPOS] = ctrl[:3] = np.clip(moved, WORKSPACE_LOW, WORKSPACE_HIGH)

    def control(self, ctrl: Array, action: Array) -> Array:
        """Move the position target by ``action``'s displacement and close the fingers where its grip is positive."""
        xp = array_namespace(ctrl)
        target = xp.minimum(xp.maximum(ctrl[:, :3] + action[:, :3], _LOW.beside(ctrl)), _HIGH.beside(ctrl))
        open_ = xp.full((ctrl.shape[0], 1), FINGER_OPEN, dtype=target.dtype, device=device(ctrl))
        return xp.concat([target, xp.where(action[:, 3:] > 0, xp.zeros_like(open_), open_)], axis=1)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,8]: pinch point and opening, then their commanded values; metres."""
        xp = array_namespace(qpos)
        opening = xp.sum(qpos[:, FINGER_QPOS], axis=1, keepdims=True)
        state = xp.concat([qpos[:, GANTRY_QPOS], opening, ctrl[:, :3], 2 * ctrl[:, 3:4]], axis=1)
        low, high = self._state_low.beside(qpos), self._state_high.beside(qpos)
        return xp.minimum(xp.maximum(xp.astype(state, xp.float32), low), high)

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the fingers."""
        return array_namespace(qpos).sum(qpos[:, FINGER_QPOS], axis=1)


def scatter(count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
    """``count`` positions [count,2] in metres within ``SPREAD``, at least ``spacing`` (or [count,count]) apart."""
    while True:
        xy = rng.uniform(-SPREAD, SPREAD, (count, 2))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1) + np.eye(count)
        if (gaps >= spacing).all():
            return xy
