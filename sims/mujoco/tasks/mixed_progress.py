"""How far an episode of mixed has come, as somebody who watches the robot could estimate it."""

from __future__ import annotations

import numpy as np

from sims.mujoco.tasks.lift_potential import potential
from sims.mujoco.tasks.mixed import MixedTask
from vla_rl.contract.env import Observation, on_host

_REACH, _NEAR = 0.4, 0.1  # share of reaching in the whole; metres at which something is nearly done
_LIFTED = np.array([family == "lift" for family in MixedTask().families])  # by number of the instruction


def progress(obs: Observation) -> np.ndarray:
    """float64 [E] from 0 to 1: in lift its ``potential``; else for the gripper at the cube and the cube at its goal."""
    cube, goal = (np.asarray(obs.extras[f"privileged/{name}"], np.float64) for name in ("target", "goal"))
    reached = 1 - np.tanh(np.linalg.norm(obs.state[:, :3] - cube, axis=1) / _NEAR)
    brought = 1 - np.tanh(np.linalg.norm(goal[:, :2] - cube[:, :2], axis=1) / _NEAR)
    return np.where(_LIFTED[on_host(obs.task)], potential(obs), _REACH * reached + (1 - _REACH) * brought)
