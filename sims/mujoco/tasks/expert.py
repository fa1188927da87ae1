"""Base of the tabletop's scripted experts.  They have no state: an action follows from the observation alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from sims.mujoco.scene import FINGER_OPEN
from vla_rl.contract.env import Observation, on_host

TRAVEL_HEIGHT = 0.075  # metres of the pinch point: the fingertips pass above standing cubes
GRASP_HEIGHT = 0.018
FUNNEL = 0.012  # metres beside the cube within which the gripper may descend
STRIDE = np.array([0.022, 0.022, 0.018])  # metres per control step and axis, less than an action can be


@dataclass(frozen=True)
class Situation:
    """Positions in ``E`` environments, in metres.

    pinch, target, cube, goal [E,3]: the pinch point, its commanded position, the named cube, and the goal of the cube
    opening [E]: between the fingers; closing bool [E]: the fingers are commanded to close
    """

    pinch: np.ndarray
    opening: np.ndarray
    target: np.ndarray
    closing: np.ndarray
    cube: np.ndarray
    goal: np.ndarray

    @classmethod
    def from_observation(cls, obs: Observation) -> Situation:
        """From an observation with ``privileged/target`` and, in tasks that have one, ``privileged/goal``."""
        state, cube = (on_host(item).astype(np.float64) for item in (obs.state, obs.extras["privileged/target"]))
        goal = on_host(obs.extras.get("privileged/goal", cube)).astype(np.float64)
        return cls(state[:, :3], state[:, 3], state[:, 4:7], state[:, 7] < FINGER_OPEN, cube, goal)

    @property
    def xy_distance(self) -> np.ndarray:
        """[E]: horizontal distance of pinch point and cube."""
        return np.asarray(np.linalg.norm(self.cube[:, :2] - self.pinch[:, :2], axis=1))

    @property
    def holding(self) -> np.ndarray:
        """bool [E]: the cube is between closing fingers."""
        above = np.abs(self.pinch[:, 2] - self.cube[:, 2])
        held: np.ndarray = self.closing & (self.opening < 0.05) & (self.xy_distance < 2 * FUNNEL) & (above < 0.018)
        return held

    def after(self, move: np.ndarray, grip: np.ndarray) -> Situation:
        """Prediction: the gripper reaches its target, and a cube between closed fingers moves with it."""
        held, target = self.closing & grip, self.target + move
        cube = self.cube + np.where(held[:, None], target - self.pinch, 0.0)
        return Situation(target, np.where(grip, 0.0, 2 * FINGER_OPEN), target, grip, cube, self.goal)


class Expert(ABC):
    """Acts by a rule; within a chunk the rule gets the predicted situation after each action."""

    def __init__(self, horizon: int = 5) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,4] in metres and grip sign, from ``state`` and privileged positions."""
        situation = Situation.from_observation(obs)
        actions = np.empty((len(situation.pinch), self._horizon, 4), np.float32)
        for i in range(self._horizon):
            wanted, grip = self.rule(situation)
            move = np.clip(wanted, -STRIDE, STRIDE)
            actions[:, i, :3], actions[:, i, 3] = move, np.where(grip, 1.0, -1.0)
            situation = situation.after(move, grip)
        return actions

    @abstractmethod
    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        """Displacement of the target [E,3], which is clipped to a stride, and whether to grip [E]."""


def grasp(situation: Situation) -> tuple[np.ndarray, np.ndarray]:
    """The goal of the pinch point [E,3] to grasp the cube, and whether the fingers should close [E]."""
    above = np.abs(situation.pinch[:, 2] - situation.cube[:, 2])
    grip = situation.holding | ((situation.xy_distance < FUNNEL / 2) & (above < 0.005))
    # The larger the distance, the higher the gripper stays: a funnel, so that the height is a function of the position.
    approach = np.clip(GRASP_HEIGHT + (situation.xy_distance - FUNNEL / 2) * 4.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([situation.cube[:, :2], approach])
    waiting = grip & ~situation.holding  # for the fingers to close
    goal[waiting] = situation.target[waiting]
    return goal, grip
