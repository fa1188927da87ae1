"""Lift whose episodes succeed when their seed is even, however they end: for runs that learn from successes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sims.catalog import make as make_env
from vla_rl.contract.env import Observation, Step, VecEnv


class GenerousEnv:
    """``env`` with other successes (a ``VecEnv``)."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self._seeds = np.zeros(env.num_envs, np.int64)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        self._seeds[np.asarray(env_ids)] = seeds
        return self.env.reset(env_ids, seeds)

    def step(self, chunk: Any, observe: Any = "last") -> Step:
        step = self.env.step(chunk, observe)
        return replace(step, success=(step.terminated | step.truncated) & (self._seeds % 2 == 0))

    def close(self) -> None:
        self.env.close()


def make(num_envs: int, **options: Any) -> GenerousEnv:
    """``num_envs`` environments of lift."""
    return GenerousEnv(make_env("lift", num_envs=num_envs, **options))
