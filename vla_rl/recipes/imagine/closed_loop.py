"""Does a dream rate policies as the truth does?  The same policies on the same scenes, dreamt and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.policies.epsilon_random import EpsilonRandomPolicy
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.imagine.coevolution import Trained
from vla_rl.recipes.imagine.imagined_env import DreamWorld
from vla_rl.recipes.progress import bar

RANDOM_ACTION_PROB = (
    0.0,
    0.1,
    0.2,
    0.35,
    0.5,
    0.75,
)  # shares of random decisions, fixed beforehand: from good to hopeless


@dataclass(frozen=True)
class Rated:
    """A policy's success in both."""

    name: str
    imagined: Rate
    true: Rate


def closed_loop(
    trained: Trained, world: EnvConfig, policies: Mapping[str, Policy], scenes: Sequence[int], rows: int, seed: int
) -> list[Rated]:
    """Every one of ``policies``, more or less clumsy, from the first moments of the simulator's ``scenes``.

    Dreams are as long as can be trusted and end as RL's do; simulated episodes have RL's deadline.
    """
    pool = load("world_models.initial_states:InOrder")(first_looks(world, scenes, trained.model.config.memory))
    imagined = DreamWorld(trained.model, pool, trained.limits, trained.dream)
    rated = []
    for name, policy in policies.items():
        for share in RANDOM_ACTION_PROB:
            player = EpsilonRandomPolicy(policy, trained.model.spec, share) if share else policy
            called = f"{name}, {share:.0%} random" if share else name
            dreamt = _played(imagined, player, range(len(scenes)), rows, seed, f"dream: {called}")
            true = _played(_Training(world), player, scenes, rows, seed, f"truth: {called}")
            rated.append(Rated(called, dreamt.rate, true.rate))
    return rated


@dataclass(frozen=True)
class _Training:
    """``world`` as RL has it, to judge in."""

    env: EnvConfig

    def make(self, rows: int) -> Any:
        return self.env.make_training(rows)

    make_training = make


def _played(world: EnvFactory, policy: Policy, seeds: Sequence[int], rows: int, seed: int, what: str) -> Outcomes:
    env = world.make(rows)
    with bar(what, len(seeds)) as update:
        outcomes = evaluate(
            env, policy, seeds, noise_seed=seed, report=lambda done, won: update(done, f"success {won / done:.0%}")
        )
    env.close()
    return outcomes


def first_looks(world: EnvConfig, scenes: Sequence[int], memory: int) -> Any:
    """What is seen first in each of ``scenes``, as a ``world_models.initial_states.Start``."""
    env = world.make(min(64, len(scenes)))
    cameras, parts = sorted(env.spec.images), []
    for first in range(0, len(scenes), env.num_envs):
        batch = np.array(scenes[first : first + env.num_envs])
        obs = env.reset(np.arange(len(batch)), batch).select(slice(0, len(batch)))
        pictures = np.moveaxis(np.concatenate([obs.images[name] for name in cameras], -1), -1, 1)
        parts.append((np.repeat(pictures[:, None], 1 + memory, 1), np.asarray(obs.state), np.asarray(obs.task)))
    env.close()
    return load("world_models.initial_states:Start")(*(np.concatenate(items) for items in zip(*parts, strict=True)))
