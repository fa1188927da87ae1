"""How far the arm has come with its cube: for learners that need more than the reward of success."""

from __future__ import annotations

import numpy as np

from sims.mujoco.scene import CUBE_EDGE
from sims.mujoco.so101 import arm
from sims.mujoco.tabletop import LIFT_HEIGHT
from vla_rl.contract.env import Observation

_REACH, _NEAR = 0.5, 0.1  # share of reaching in the whole; metres at which it is nearly done


def potential(obs: Observation) -> np.ndarray:
    """float64 [E] from 0 to 1: half for the gripper at the named cube, half for the height of that cube.

    As ``potential`` of ``sims.as_gymnasium``, its increase is added to the reward.
    """
    target = np.asarray(obs.extras["privileged/target"], np.float64)
    distance = np.linalg.norm(arm.pinch_point(np.asarray(obs.state, np.float64)) - target, axis=1)
    risen = (target[:, 2] - CUBE_EDGE / 2) / (LIFT_HEIGHT - CUBE_EDGE / 2)
    total: np.ndarray = _REACH * (1 - np.tanh(distance / _NEAR)) + (1 - _REACH) * np.clip(risen, 0, 1)
    return total
