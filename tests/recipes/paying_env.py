"""Lift in which every control step pays by where the arm is: for short runs that have something to learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sims.catalog import make as make_env
from vla_rl.contract.env import Observation, Step, VecEnv


class PayingEnv:
    """``env`` with another reward (a ``VecEnv`` with snapshots)."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.spec, self.num_envs, self.close = env, env.spec, env.num_envs, env.close
        self.reset, self.snapshot, self.restore = env.reset, env.snapshot, env.restore  # type: ignore[attr-defined]

    def step(self, chunk: Any, observe: Any = "last") -> Step:
        step = self.env.step(chunk, observe)
        pay = np.where(step.valid, _pay(step.obs)[:, None], 0.0)
        return replace(step, reward=pay.astype(step.reward.dtype))


def _pay(obs: Observation) -> Any:
    return 10.0 * obs.state[:, :3].sum(1)


def make(num_envs: int, **options: Any) -> PayingEnv:
    """``num_envs`` environments of lift."""
    return PayingEnv(make_env("lift", num_envs=num_envs, **options))
