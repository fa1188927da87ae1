"""A scripted expert for lift that needs no memory: what to do follows from where things are."""

from __future__ import annotations

import numpy as np

from sims.mujoco.scene import FINGER_OPEN
from sims.mujoco.tasks.lift import MOST_DISPLACEMENT
from vla_rl.contract.env import Observation

TRAVEL_HEIGHT = 0.075  # metres of the pinch point: the fingertips pass above standing cubes
GRASP_HEIGHT = 0.018
HOLD_HEIGHT = 0.11
STRIDE = np.array([0.022, 0.022, 0.018])  # metres per control step
FUNNEL = 0.012  # metres beside the cube within which the gripper may descend


class LiftExpert:
    """Moves above the named cube, descends, closes, lifts and holds.

    It looks at ``privileged/target`` and at ``state``; the phase is inferred from them at every call.  A chunk is made
    by applying the same rule to where the gripper would be after each of its actions.
    """

    def __init__(self, horizon: int = 5) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,4] in metres and grip sign."""
        pinch, opening = obs.state[:, :3].astype(np.float64), obs.state[:, 3].astype(np.float64)
        target, closing = obs.state[:, 4:7].astype(np.float64), obs.state[:, 7] < FINGER_OPEN
        cube = obs.extras["privileged/target"].astype(np.float64)
        actions = np.empty((len(pinch), self._horizon, 4), np.float32)
        for i in range(self._horizon):
            move, grip = _rule(pinch, opening, target, closing, cube)
            actions[:, i, :3], actions[:, i, 3] = move, np.where(grip, 1.0, -1.0)
            # Foresee: the gripper reaches its target, closed fingers meet the cube, and the cube follows them.
            held = closing & grip
            target = target + move
            cube = cube + np.where(held[:, None], target - pinch, 0.0)
            pinch, closing = target, grip
            opening = np.where(grip, 0.0, 2 * FINGER_OPEN)
        return actions


def _rule(
    pinch: np.ndarray, opening: np.ndarray, target: np.ndarray, closing: np.ndarray, cube: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Displacement [E,3] of the target and whether to grip [E], for pinch point, target and cube [E,3]."""
    beside = np.linalg.norm(cube[:, :2] - pinch[:, :2], axis=1)
    above = np.abs(pinch[:, 2] - cube[:, 2])
    holding = closing & (opening < 0.05) & (beside < 2 * FUNNEL) & (above < 0.018)
    grip = holding | ((beside < FUNNEL / 2) & (above < 0.005))
    # The further beside the cube, the higher the gripper stays: a funnel, so that height follows from position.
    approach = np.clip(GRASP_HEIGHT + (beside - FUNNEL / 2) * 4.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([cube[:, :2], np.where(holding, HOLD_HEIGHT, approach)])
    goal[holding, :2] = target[holding, :2]
    waiting = grip & ~holding  # for the fingers to close
    goal[waiting] = target[waiting]
    move = np.clip(goal - target, -STRIDE, STRIDE)
    return np.clip(move, -MOST_DISPLACEMENT, MOST_DISPLACEMENT), grip
