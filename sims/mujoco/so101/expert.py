"""A scripted expert for the arm.  It has no state: an action follows from the observation alone."""

from __future__ import annotations

import numpy as np

from sims.mujoco.so101 import arm
from sims.mujoco.so101.robot import ROLL
from vla_rl.contract.env import Observation, on_host

STRIDE = 0.04  # radians per control step, of the joint that moves most
OPEN, CLOSED = 0.6, 0.1  # commanded openings
CLEARANCE = 0.010  # metres from the fixed jaw to a cube's face, before the moving jaw closes
TRAVEL_HEIGHT, GRASP_HEIGHT, HOLD_HEIGHT = 0.085, 0.018, 0.10  # metres of the pinch point
RISE = 0.03  # metres above the pinch point that a held cube is carried towards
NEAR = 0.008  # metres beside the place to grasp within which the gripper may descend
_BETWEEN = 0.022  # metres from the pinch point within which a cube is between the jaws
_HELD = (0.18, 0.30)  # openings between which there is a cube in the gripper
_CLOSING = 0.1  # opening per control step by which the jaws close


class So101Expert:
    """Moves above the named cube, descends beside it, closes, lifts and holds."""

    def __init__(self, horizon: int = 1) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,6], the later ones from predicted joints and cubes."""
        joints = on_host(obs.state).astype(np.float64)
        cube = on_host(obs.extras["privileged/target"]).astype(np.float64)
        actions = np.empty((len(joints), self._horizon, 6), np.float32)
        for i in range(self._horizon):
            actions[:, i] = action = _next(joints, cube)
            cube = cube + np.where(_holding(joints, cube), 1.0, 0.0)[:, None] * (
                arm.pinch_point(action) - arm.pinch_point(joints)
            )
            joints = _predicted(joints, action, cube)
        return actions


def _next(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Targets [E,6] of one control step from ``joints`` [E,6] and the named ``cube`` [E,3]."""
    pinch, holding = arm.pinch_point(joints), _holding(joints, cube)
    angle = np.arctan2(cube[:, 1], cube[:, 0] - arm.LINKS[0].position[0])
    beside = cube[:, :2] - CLEARANCE * np.stack([-np.sin(angle), np.cos(angle)], axis=1)
    away = np.linalg.norm(beside - pinch[:, :2], axis=1)
    centred = np.linalg.norm(cube[:, :2] - pinch[:, :2], axis=1) < CLEARANCE + NEAR
    grip = holding | (centred & (pinch[:, 2] < GRASP_HEIGHT + 0.006))
    # The larger the distance, the higher the gripper stays: a funnel, so that the height is a function of the position.
    height = np.clip(GRASP_HEIGHT + (away - NEAR) * 3.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([beside, height])
    goal[holding] = np.column_stack([pinch[:, :2], np.minimum(pinch[:, 2] + RISE, HOLD_HEIGHT)])[holding]
    wanted = arm.solve(goal, ROLL)
    stay = grip & ~holding  # until the jaws have closed
    wanted[stay] = joints[stay, :5]
    left = wanted - joints[:, :5]
    moved = joints[:, :5] + left * np.minimum(1.0, STRIDE / np.maximum(np.abs(left).max(1), 1e-9))[:, None]
    return np.column_stack([moved, np.where(grip, CLOSED, OPEN)])


def _predicted(joints: np.ndarray, action: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """[E,6]: the arm reaches its targets in a control step; the jaws take several and stop at a cube."""
    opening = np.clip(action[:, 5], joints[:, 5] - _CLOSING, joints[:, 5] + _CLOSING)
    between = np.linalg.norm(cube - arm.pinch_point(joints), axis=1) < _BETWEEN
    return np.column_stack([action[:, :5], np.where(between, np.maximum(opening, np.mean(_HELD)), opening)])


def _holding(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """bool [E]: the jaws have closed on the cube."""
    near = np.linalg.norm(cube - arm.pinch_point(joints), axis=1) < _BETWEEN
    return np.asarray(near & (joints[:, 5] > _HELD[0]) & (joints[:, 5] < _HELD[1]))
