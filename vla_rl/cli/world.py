"""Where a policy lives: the environment, who demonstrates in it, and pictures to learn pointing from, as strings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vla_rl.contract.env import VecEnv
from vla_rl.contract.load import load


@dataclass(frozen=True)
class World:
    """An environment of the catalogue and what belongs to it; every string is "module:name"."""

    env: str = "lift"
    options: dict[str, Any] = field(default_factory=dict)  # of the environment, as in ``sims/catalog.py``
    training_options: dict[str, Any] = field(default_factory=dict)  # on top of them while learning by RL
    distractor_options: dict[str, Any] = field(default_factory=lambda: {"instruct": "distractor"})
    expert: str = "sims.mujoco.tasks.lift_expert:LiftExpert"
    scenes: str = "sims.mujoco.tasks.lift_scenes:random_scenes"
    catalog: str = "sims.catalog:make"

    def make(self, rows: int, **more: Any) -> VecEnv:
        """The environment with ``rows`` rows."""
        env: VecEnv = load(self.catalog)(self.env, num_envs=rows, **{**self.options, **more})
        return env

    def training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""
        return self.make(rows, **self.training_options)

    def misled(self, rows: int) -> VecEnv:
        """The same scenes with an instruction that names another object of them."""
        return self.make(rows, **self.distractor_options)

    def with_options(self, **options: Any) -> World:
        """The same world with some environment options changed."""
        return replace(self, options={**self.options, **options})
