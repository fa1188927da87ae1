"""A scripted expert for place."""

from __future__ import annotations

import numpy as np

from sims.mujoco.scene import FINGER_OPEN
from sims.mujoco.tasks.expert import GRASP_HEIGHT, TRAVEL_HEIGHT, Expert, Situation, grasp

CLEAR = 0.058  # metres of the pinch point at which a held cube passes above a standing one
ARRIVED = 0.006  # metres beside the plate's centre
DOWN = 0.0215  # metres of a cube's centre that is about to stand
RISE = 0.09


class PlaceExpert(Expert):
    """Grasps the named cube, carries it above the named plate, lowers it, lets go and rises."""

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        goal, grip = grasp(situation)
        away = np.linalg.norm(situation.goal[:, :2] - situation.cube[:, :2], axis=1)
        delivered = (away < 2 * ARRIVED) & (situation.cube[:, 2] < DOWN)

        carrying = situation.holding & ~delivered
        low = (situation.pinch[:, 2] < CLEAR) & (away > 3 * ARRIVED)  # lift it straight up first
        height = np.clip(GRASP_HEIGHT + (away - ARRIVED) * 4.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
        over = (
            situation.pinch[:, :2] + situation.goal[:, :2] - situation.cube[:, :2]
        )  # the cube may hang beside the pinch point
        goal[carrying] = np.column_stack([over, height])[carrying]
        goal[carrying & low, :2], goal[carrying & low, 2] = situation.target[carrying & low, :2], TRAVEL_HEIGHT

        opened = situation.opening > 1.8 * FINGER_OPEN
        goal[delivered] = situation.target[delivered]
        goal[delivered & opened, 2] = RISE
        return goal - situation.target, grip & ~delivered
