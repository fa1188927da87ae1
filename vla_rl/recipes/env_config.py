"""The environment of a run: its name and options.  What belongs to its task is declared by the task's own module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from vla_rl.contract.env import VecEnv
from vla_rl.contract.foreign import check_env_quickly
from vla_rl.contract.spec import EnvSpec
from vla_rl.recipes import sims
from vla_rl.recipes.json_types import JsonObject


class EnvFactory(Protocol):
    """Makes the environments of a run, simulated or imagined."""

    def make(self, num_envs: int) -> VecEnv:
        """``num_envs`` environments to evaluate in."""

    def make_training(self, num_envs: int) -> VecEnv:
        """``num_envs`` environments for reinforcement learning."""


@dataclass(frozen=True)
class EnvConfig:
    """An environment by name, with its options; ``--env NAME`` sets ``name``.

    ``name`` is in the catalogue (``sims/catalog.py``) or "package.module:make", also in the working folder.  Expert,
    labelled scenes and swapped instruction are those that its module declares (``vla_rl/contract/task.py``); asking for
    one that it does not declare raises UserError.
    """

    name: str = "lift"
    options: JsonObject = field(default_factory=dict)  # of the environment
    training_options: JsonObject = field(default_factory=dict)  # on top of them while learning by RL

    def make(self, num_envs: int, **more: object) -> VecEnv:
        """``num_envs`` environments, with ``more`` options on top of ``options``."""
        return sims.make_env(self.name, num_envs, **{**self.options, **more})

    def make_training(self, num_envs: int) -> VecEnv:
        """``num_envs`` environments for reinforcement learning."""
        return self.make(num_envs, **self.training_options)

    def make_swapped(self, num_envs: int) -> VecEnv:
        """The same scenes with an instruction that names another object in them."""
        return self.make(num_envs, **sims.catalog().swapped_options(self.name))

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`; where the task declares it, no environment is built."""
        return sims.catalog().spec_of(self.name, **self.options)

    def check(self) -> None:
        """Check an environment of the user's own before training; raises ContractError about its first mistake.

        Those of the catalogue are checked by the tests.  It is reset and stepped, so do not check a robot like this.
        """
        if ":" in self.name:
            env = self.make_training(2)
            check_env_quickly(env)
            env.close()

    def make_expert(self, horizon: int = 1) -> sims.Expert:
        """The task's scripted expert, which plans ``horizon`` actions."""
        return sims.catalog().expert(self.name, horizon)

    def draw_scenes(self, count: int, seed: int) -> sims.Scenes:
        """``count`` labelled random scenes of the task."""
        return sims.catalog().scenes(self.name)(count, seed)

    def with_options(self, **options: object) -> EnvConfig:
        """The same with some environment options changed."""
        return replace(self, options={**self.options, **options})
