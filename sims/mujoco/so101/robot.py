"""The arm on the tabletop: joint positions in, joint positions out (``sims.mujoco.robot.Robot``)."""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.arrays import Constant
from sims.mujoco.scene import PHYSICS_DT
from sims.mujoco.so101 import arm
from sims.mujoco.so101.scene import build_model
from vla_rl.contract.env import Array
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import ArraySpec

RATES = (20, 25, 40, 50)  # Hz, that whole physics steps make
REACH = (0.16, 0.25)  # metres from the axis of shoulder_pan, within which cubes lie
SIDE = 0.6  # radians to either side, within which cubes lie
ROLL = np.pi / 2  # of the wrist: the jaws open across the picture of the camera "front"
_AROUND = 0.1  # radians by which a joint may be pushed beyond its limits before its measurement is clipped
_AXIS = arm.LINKS[0].position[0]
_NAMES = tuple(f"{joint}.pos" for joint in arm.JOINTS)
_UNITS = "rad,rad,rad,rad,rad,1"
_START_LOW, _START_HIGH = np.array([0.16, -0.09, 0.08]), np.array([0.24, 0.09, 0.14])  # metres, of the pinch point
_WITHIN = np.array([0.13, -0.20, 0.02]), np.array([0.25, 0.20, 0.16])
_OPEN = (0.45, 0.65)  # of the gripper at the start
_GAP = (0.0281, -0.00906, 0.04789)  # metres: the middle of the moving jaw's face turns about its joint


class So101:
    """Absolute targets of the six joints, and their measured positions; the gripper as an opening from 0 to 1."""

    first_cube = len(arm.JOINTS)

    def __init__(self, control_hz: int = 25) -> None:
        """Raises UserError for a rate that is not among ``RATES``."""
        if control_hz not in RATES:
            raise UserError(
                f"control_hz={control_hz} is no whole number of physics steps of {1000 * PHYSICS_DT:g} ms, so the arm "
                f"cannot be commanded at that rate; give one of {', '.join(map(str, RATES))}."
            )
        self.substeps = round(1 / (control_hz * PHYSICS_DT))
        low, high = (*arm.LOW[:5].tolist(), 0.0), (*arm.HIGH[:5].tolist(), 1.0)
        self.action = ArraySpec((6,), "float32", low, high, unit=_UNITS, names=_NAMES)
        lower, higher = tuple(x - _AROUND for x in low), tuple(x + _AROUND for x in high)
        self.state = ArraySpec((6,), "float32", lower, higher, unit=_UNITS, names=_NAMES)
        self._state_low, self._state_high = Constant(lower, np.float32), Constant(higher, np.float32)

    def build_model(self, cubes: int, marks: int) -> mujoco.MjModel:
        """The scene of ``so101/scene.py``."""
        return build_model(cubes, marks)

    def scatter(self, count: int, spacing: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
        """``count`` places [count,2] in metres within reach, at least ``spacing`` (or [count,count]) apart."""
        while True:
            away, angle = rng.uniform(*REACH, count), rng.uniform(-SIDE, SIDE, count)
            xy = np.stack([_AXIS + away * np.cos(angle), away * np.sin(angle)], axis=1)
            gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1) + np.eye(count)
            if (gaps >= spacing).all():
                return xy

    def start(self, qpos: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The open gripper points down, somewhere above the cubes; returns the matching ``ctrl`` [6]."""
        joints = arm.solve(rng.uniform(_START_LOW, _START_HIGH)[None], ROLL)[0]
        qpos[:6] = [*joints, arm.closing_angle(rng.uniform(*_OPEN))]
        return qpos[:6].copy()

    def displace(self, qpos: np.ndarray, ctrl: np.ndarray, values: Mapping[str, float]) -> None:
        """Shift the pinch point's start within reach."""
        moved = arm.pinch_point(qpos[None, :5]) + np.array([values[f"gripper_{axis}"] for axis in "xyz"])
        qpos[:5] = ctrl[:5] = arm.solve(np.clip(moved, *_WITHIN), float(qpos[4]))[0]

    def control(self, ctrl: Array, action: Array) -> Array:
        """The joints' targets are the action; the gripper's is an angle."""
        xp = array_namespace(action)
        action = xp.astype(action, ctrl.dtype)
        return xp.concat([action[:, :5], arm.closing_angle(action[:, 5:6])], axis=1)

    def proprioception(self, qpos: Array, ctrl: Array) -> Array:
        """float32 [R,6]: the joints' positions, and the opening of the gripper."""
        xp = array_namespace(qpos)
        state = xp.concat([qpos[:, :5], arm.opening(qpos[:, 5:6])], axis=1)
        low, high = self._state_low.beside(qpos), self._state_high.beside(qpos)
        return xp.minimum(xp.maximum(xp.astype(state, xp.float32), low), high)

    def opening(self, qpos: Array) -> Array:
        """[R]: metres between the jaws, at the middle of the moving one."""
        xp, angle = array_namespace(qpos), qpos[:, 5]
        return _GAP[0] + _GAP[1] * xp.cos(angle) + _GAP[2] * xp.sin(angle)
