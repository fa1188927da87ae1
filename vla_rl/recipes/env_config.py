"""Where a policy lives: the environment, who demonstrates in it, and pictures to learn pointing from, as strings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vla_rl.contract.config import from_json
from vla_rl.contract.env import VecEnv
from vla_rl.contract.load import load


class EnvFactory(Protocol):
    """Where policies are trained and judged, simulated or imagined."""

    def make(self, rows: int) -> VecEnv:
        """The environment with ``rows`` rows."""

    def make_training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""


@dataclass(frozen=True)
class EnvConfig:
    """An environment of the catalogue and what belongs to it; every string is "module:name"."""

    name: str = "lift"
    options: dict[str, Any] = field(default_factory=dict)  # of the environment, as in ``sims/catalog.py``
    training_options: dict[str, Any] = field(default_factory=dict)  # on top of them while learning by RL
    distractor_options: dict[str, Any] = field(default_factory=lambda: {"instruct": "distractor"})
    expert: str = "sims.mujoco.tasks.lift_expert:LiftExpert"
    scenes: str = "sims.mujoco.tasks.lift_scenes:random_scenes"
    catalog: str = "sims.catalog:make"

    def make(self, rows: int, **more: Any) -> VecEnv:
        """The environment with ``rows`` rows."""
        env: VecEnv = load(self.catalog)(self.name, num_envs=rows, **{**self.options, **more})
        return env

    def make_training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""
        return self.make(rows, **self.training_options)

    def make_swapped(self, rows: int) -> VecEnv:
        """The same scenes with an instruction that names another object of them."""
        return self.make(rows, **self.distractor_options)

    def with_options(self, **options: Any) -> EnvConfig:
        """The same world with some environment options changed."""
        return replace(self, options={**self.options, **options})


def env_config_of(checkpoint: str | Path) -> EnvConfig | None:
    """The world of the run that a checkpoint folder lies in (``RUN/checkpoints/NAME``); None when it lies in none."""
    run = Path(checkpoint).resolve().parent.parent / "config.json"
    try:
        found = from_json(json.loads(run.read_text(encoding="utf-8")).get("env"))
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, EnvConfig) else None
