"""Who watches the robots of a fleet in virtual time: a person who corrects, or one who demonstrates instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.limits import check_limits
from vla_rl.contract.load import load
from vla_rl.experience.demonstrator import DemonstratedEnv, DemonstratorConfig
from vla_rl.experience.person import People, PersonConfig
from vla_rl.experience.supervised import SupervisedEnv
from vla_rl.recipes.env_config import EnvConfig


class PersonFactory(Protocol):
    """The frozen dataclass of somebody who acts on a robot at times."""

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """``envs``, the robots of a fleet that ``config`` has made, with that person."""


@dataclass(frozen=True)
class Corrects:
    """Takes over where a robot visibly fails, and keeps to ``max_share`` on every robot.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    people    who watch all robots together, each with one robot at a time; 0: every robot has a person of its own
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    people: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for fewer people than none."""
        check_limits(self, people=(0, math.inf))

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        people = People(self.people or len(envs))
        expert, progress = config.make_expert().act, _progress(self.progress)
        return [SupervisedEnv(env, expert, progress, self.person, people) for env in envs]


@dataclass(frozen=True)
class Demonstrates:
    """Does whole episodes from their beginning, ``demonstrator.steps`` control steps in the whole fleet."""

    demonstrator: DemonstratorConfig = field(default_factory=DemonstratorConfig)

    def watch(self, envs: Sequence[VecEnv], config: EnvConfig) -> list[VecEnv]:
        """Raises UserError for an environment without a scripted expert."""
        own = replace(self.demonstrator, steps=self.demonstrator.steps // len(envs))
        return [DemonstratedEnv(env, config.make_expert().act, own) for env in envs]


class Progress(Protocol):
    """How far the tasks have come."""

    def __call__(self, obs: Observation) -> np.ndarray:
        """[E] from 0 to 1."""


def _progress(name: str) -> Progress:
    found: Progress = load(name)
    return found
