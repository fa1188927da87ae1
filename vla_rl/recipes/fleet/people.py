"""Who watches the robots of a fleet in virtual time: a person who corrects, or one who demonstrates instead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.load import load
from vla_rl.experience.demonstrator import DemonstratedEnv, DemonstratorConfig
from vla_rl.experience.person import PersonConfig
from vla_rl.experience.supervised import SupervisedEnv
from vla_rl.recipes.env_config import EnvConfig


class PersonFactory(Protocol):
    """The frozen dataclass of somebody who acts on a robot at times."""

    def watch(self, env: VecEnv, config: EnvConfig, robots: int) -> VecEnv:
        """``env``, one of ``robots`` that ``config`` has made, with that person."""


@dataclass(frozen=True)
class Corrects:
    """Takes over where a robot visibly fails.  Every robot has a person of its own, who keeps to ``max_share`` there.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)

    def watch(self, env: VecEnv, config: EnvConfig, robots: int) -> SupervisedEnv:
        """Raises UserError for an environment without a scripted expert."""
        return SupervisedEnv(env, config.make_expert().act, _progress(self.progress), self.person)


@dataclass(frozen=True)
class Demonstrates:
    """Does whole episodes from their beginning, ``demonstrator.steps`` control steps in the whole fleet."""

    demonstrator: DemonstratorConfig = field(default_factory=DemonstratorConfig)

    def watch(self, env: VecEnv, config: EnvConfig, robots: int) -> DemonstratedEnv:
        """Raises UserError for an environment without a scripted expert."""
        own = replace(self.demonstrator, steps=self.demonstrator.steps // robots)
        return DemonstratedEnv(env, config.make_expert().act, own)


class Progress(Protocol):
    """How far the tasks have come."""

    def __call__(self, obs: Observation) -> np.ndarray:
        """[E] from 0 to 1."""


def _progress(name: str) -> Progress:
    found: Progress = load(name)
    return found
