"""What the acting processes of the tests are made of: plain functions, found by "tests.experience.makers:NAME"."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch

from sims.catalog import make
from vla_rl.contract.batch import Rollout
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy


def gaussian(env: str, num_envs: int, decisions: int, horizon: int, seed: int) -> RolloutSource:
    """A Gaussian policy in a toy environment; ``seed`` decides its weights, its noise and the episodes."""
    toy = make(env, num_envs=num_envs)
    torch.manual_seed(seed)
    policy = GaussianPolicy(toy.spec, config=GaussianConfig(horizon, width=32))
    noise = torch.Generator().manual_seed(seed)
    return RolloutSource(toy, policy, decisions, SeedStream(1000 * seed, 1000 * seed + 500), noise)


class Annealed(GaussianPolicy):
    """Remembers the progress that was published to it."""

    progress = 0.0

    def set_progress(self, progress: float) -> None:
        self.progress = progress


class AnnealedSource:
    """Reports in ``info`` what its policy was given."""

    def __init__(self, source: RolloutSource, policy: Annealed) -> None:
        self.source, self.policy = source, policy

    def next(self) -> Rollout:
        rollout = self.source.next()
        return replace(rollout, info={**rollout.info, "progress": self.policy.progress})


def annealed(env: str, num_envs: int, decisions: int, horizon: int, seed: int) -> AnnealedSource:
    """A ``ScheduledPolicy`` in a toy environment."""
    toy = make(env, num_envs=num_envs)
    policy = Annealed(toy.spec, config=GaussianConfig(horizon, width=32))
    source = RolloutSource(toy, policy, decisions, SeedStream(0, 500), torch.Generator().manual_seed(seed))
    return AnnealedSource(source, policy)


class Failing:
    """Writes to standard output, and misbehaves at its second, third and fourth rollout."""

    def __init__(self) -> None:
        self.source, self.calls = gaussian("point_mass", 2, 2, 1, 0), 0
        self.policy = self.source.policy

    def next(self) -> Rollout:
        self.calls += 1
        print("a library that talks to standard output", "x" * 10_000)
        os.write(1, b"and one that does it below Python")
        assert sys.stdin.read() == ""
        if self.calls == 2:
            raise ZeroDivisionError("the wheel came off")
        if self.calls == 3:
            with torch.no_grad():
                self.policy.log_std.fill_(float("nan"))
        if self.calls == 4:
            os.abort()
        return self.source.next()


def failing() -> Failing:
    """A source with troubles."""
    return Failing()


def unable(**options: Any) -> None:
    """Cannot be made."""
    raise RuntimeError(f"no such device: {sorted(options)}")
