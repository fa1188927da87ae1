"""A scripted expert for push."""

from __future__ import annotations

import numpy as np

from sims.mujoco.tasks.expert import TRAVEL_HEIGHT, Expert, Situation

LOW = 0.018  # metres of the pinch point while pushing
BEHIND = 0.042  # metres between cube and pinch point before the push: clear of a turned cube's corner
CONTACT = 0.027  # metres between them while a face is pushed
ALIGNED = 0.010  # metres beside the line from cube to target
PUSH = 0.012  # metres per control step
ARRIVED = 0.008


class PushExpert(Expert):
    """With closed fingers: goes to the side of the cube away from the target, pushes along that line, rises at the end.

    Where the cube slips off the line, the gripper goes behind it again.  The motion of a pushed cube is not predicted,
    so only the first action of a chunk is good.
    """

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        way = situation.goal[:, :2] - situation.cube[:, :2]
        left = np.linalg.norm(way, axis=1)
        ahead = way / np.maximum(left, 1e-6)[:, None]
        from_cube = situation.pinch[:, :2] - situation.cube[:, :2]
        along = (from_cube * ahead).sum(axis=1)
        beside = np.linalg.norm(from_cube - along[:, None] * ahead, axis=1)
        distance = np.linalg.norm(from_cube, axis=1)

        # Go to a point behind the cube: the further from it, the higher; straight up first when beside the cube.
        behind = situation.cube[:, :2] - BEHIND * ahead
        off = np.linalg.norm(situation.pinch[:, :2] - behind, axis=1)
        height = np.clip(LOW + (off - 0.006) * 4.0, LOW, TRAVEL_HEIGHT)
        goal = np.column_stack([behind, height])
        blocked = (situation.pinch[:, 2] < 0.055) & (distance < 0.055) & (off > 0.012)
        goal[blocked, :2], goal[blocked, 2] = situation.target[blocked, :2], TRAVEL_HEIGHT

        # Push: from the line behind the cube, towards a point inside it.
        pushing = (
            (situation.pinch[:, 2] < 0.03) & (along < -0.5 * CONTACT) & (beside < ALIGNED) & (distance < BEHIND + 0.02)
        )
        step = np.minimum(PUSH, 0.5 * left + 0.002)
        ahead_of_cube = situation.cube[:, :2] + (along + step)[:, None] * ahead
        goal[pushing, :2], goal[pushing, 2] = ahead_of_cube[pushing], LOW

        done = left < ARRIVED
        goal[done, :2], goal[done, 2] = situation.target[done, :2], TRAVEL_HEIGHT
        return goal - situation.target, np.ones(len(left), bool)
