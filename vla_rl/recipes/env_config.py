"""The environment of a run: its name and options.  What belongs to its task is declared by the task's own module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from vla_rl.contract.check import check_env_quickly
from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.recipes import sims
from vla_rl.recipes.terminal import spinner


class EnvFactory(Protocol):
    """Makes the environments of a run, simulated or imagined."""

    def make(self, num_envs: int) -> VecEnv:
        """``num_envs`` environments to evaluate in."""

    def make_training(self, num_envs: int) -> VecEnv:
        """``num_envs`` environments for reinforcement learning."""

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`; no environment is built where that can be avoided."""


@dataclass(frozen=True)
class EnvConfig:
    """An environment by name, with its options; ``--env NAME`` sets ``name``.

    ``name`` is in the catalogue (``sims/catalog.py``) or "package.module:make", also in the working folder; "" is no
    environment.  Expert, labelled scenes, swapped instruction, claims and progress are those that its module declares
    (``vla_rl/contract/task.py``); asking for one that it does not declare raises UserError.
    """

    name: str
    options: JsonObject = field(default_factory=dict)  # of the environment
    training_options: JsonObject = field(default_factory=dict)  # on top of them while learning by RL

    def required(self, needed_by: str) -> EnvConfig:
        """Itself; raises UserError when it names no environment."""
        if not self.name:
            raise UserError(
                f"{needed_by} needs an environment and none was named, so nothing can be played; add --env NAME "
                "(vla-rl inspect lists them) or --env package.module:make."
            )
        return self

    def make(self, num_envs: int, **more: object) -> VecEnv:
        """``num_envs`` environments, with ``more`` options on top of ``options``."""
        with spinner(f"making {num_envs:,} x {self.name}", remarks_of="sims"):
            return sims.make_env(self.name, num_envs, **{**self.options, **more})

    def make_training(self, num_envs: int) -> VecEnv:
        return self.make(num_envs, **self.training_options)

    def make_swapped(self, num_envs: int) -> VecEnv:
        """The same scenes with an instruction that names another object in them."""
        return self.make(num_envs, **sims.catalog().swapped_options(self.name, **self.options))

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`; where the task declares it, no environment is built."""
        return sims.catalog().spec_of(self.name, **self.options)

    def declared_spec(self) -> EnvSpec | None:
        """The spec where the task declares it; None where an environment would have to be built."""
        return sims.catalog().declared_spec(self.name, **self.options)

    def check(self) -> None:
        """Check an environment of the user's own before it is played; raises ContractError about its first mistake.

        Those of the catalogue are checked by the tests.  It is reset and stepped, so do not check a robot like this.
        """
        inside = self.options.get("env", "")  # of one that wraps another
        if ":" in self.name or ":" in str(inside):
            env = self.make_training(2)
            check_env_quickly(env)
            env.close()

    def make_expert(self, horizon: int = 1) -> sims.Expert:
        """The task's scripted expert, which plans ``horizon`` actions."""
        return sims.catalog().expert(self.name, horizon, **self.options)

    def draw_scenes(self, count: int, seed: int) -> sims.Scenes:
        """``count`` labelled random scenes of the task."""
        return sims.catalog().scenes(self.name, **self.options)(count, seed)

    def claims(self) -> sims.Claims:
        """What the task's simulator knows about the pictures of an observation."""
        return sims.catalog().claims(self.name, **self.options)

    def progress(self) -> sims.Progress:
        """How far the task has come, as a person would see it."""
        return sims.catalog().progress(self.name, **self.options)

    def named(self, name: str) -> EnvConfig:
        """The environment ``name``: itself if it has this name already, otherwise without the options of this one."""
        return self if name == self.name else EnvConfig(name)

    def with_options(self, **options: object) -> EnvConfig:
        """The same with some environment options changed."""
        return replace(self, options={**self.options, **options})


NO_ENV = EnvConfig("")
"""Where the environment is named on the command line, or by the run."""
