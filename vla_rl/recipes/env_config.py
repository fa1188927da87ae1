"""The environment of a run: its name and options.  What belongs to its task is declared by the task's own module."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vla_rl.contract.config import from_json
from vla_rl.contract.env import VecEnv
from vla_rl.contract.load import load
from vla_rl.contract.spec import EnvSpec


class EnvFactory(Protocol):
    """Where policies are trained and judged, simulated or imagined."""

    def make(self, rows: int) -> VecEnv:
        """The environment with ``rows`` rows."""

    def make_training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""


@dataclass(frozen=True)
class EnvConfig:
    """An environment by name, with its options.

    ``name`` is in the catalogue (``sims/catalog.py``) or "package.module:make", also in the working folder.  Expert,
    labelled scenes and swapped instruction are those that its module declares (``vla_rl/contract/task.py``); asking for
    one that it does not declare raises UserError.
    """

    name: str = "lift"
    options: dict[str, Any] = field(default_factory=dict)  # of the environment, as in ``sims/catalog.py``
    training_options: dict[str, Any] = field(default_factory=dict)  # on top of them while learning by RL

    def make(self, rows: int, **more: Any) -> VecEnv:
        """The environment with ``rows`` rows."""
        env: VecEnv = _catalog("make")(self.name, num_envs=rows, **{**self.options, **more})
        return env

    def make_training(self, rows: int) -> VecEnv:
        """The environment for reinforcement learning."""
        return self.make(rows, **self.training_options)

    def make_swapped(self, rows: int) -> VecEnv:
        """The same scenes with an instruction that names another object of them."""
        return self.make(rows, **_catalog("swapped_options")(self.name))

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`; where the task declares it, no environment is built."""
        spec: EnvSpec = _catalog("spec_of")(self.name, **self.options)
        return spec

    def make_expert(self, horizon: int = 1) -> Any:
        """The task's scripted expert; ``act(obs)`` returns ``horizon`` actions, float32 [E,H,D]."""
        return _catalog("expert")(self.name, horizon)

    def draw_scenes(self, count: int, seed: int) -> tuple[Any, Any, Any, Any]:
        """``count`` labelled random scenes of the task: images, tasks, uv, state."""
        images, tasks, uv, state = _catalog("scenes")(self.name)(count, seed)
        return images, tasks, uv, state

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


def _catalog(function: str) -> Any:
    return load(f"sims.catalog:{function}")
