"""A scripted expert for lift."""

from __future__ import annotations

import numpy as np

from sims.mujoco.tasks.expert import Expert, Situation, grasp

HOLD_HEIGHT = 0.11


class LiftExpert(Expert):
    """Moves above the named cube, descends, closes, lifts and holds."""

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        goal, grip = grasp(situation)
        goal[situation.holding, :2], goal[situation.holding, 2] = situation.target[situation.holding, :2], HOLD_HEIGHT
        return goal - situation.target, grip
