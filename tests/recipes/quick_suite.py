"""A suite of two quick tasks that differ in the size of their goal, and a policy for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.visual_point_mass import VisualPointMass, tiny_vla
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask


class Goal(VisualPointMass):
    """Success is a distance below ``radius`` metres at the time limit."""

    def __init__(self, num_envs: int, radius: float) -> None:
        super().__init__(num_envs)
        self.radius = radius

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward, won, lost = super()._advance(env_ids, action)
        return reward, (won | lost) & (-reward < self.radius), (won | lost) & ~(-reward < self.radius)


def make(num_envs: int, radius: float) -> Goal:
    return Goal(num_envs, radius)


def quick() -> Suite:
    """Twelve episodes of each task."""
    return Suite("quick", 1, (_task("wide", 1.2), _task("narrow", 0.9)), episodes=12)


def wrong_horizon() -> Suite:
    """A suite that its environment does not fit."""
    return Suite("wrong", 1, (_task("wide", 1.0, horizon=20),))


def _task(name: str, radius: float, horizon: int = 16) -> SuiteTask:
    return SuiteTask(name, EnvConfig("tests.recipes.quick_suite:make", {"radius": radius}), horizon, "at_end")


def save_policy(folder: Path) -> str:
    """A checkpoint for both tasks."""
    tiny_vla(VisualPointMass(1).spec).save_pretrained(folder)
    return str(folder)
