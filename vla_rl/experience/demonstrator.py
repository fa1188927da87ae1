"""A person demonstrates whole episodes, whether a robot needs them or not: what corrections are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, Observe, Step, VecEnv, on_host
from vla_rl.contract.limits import check_limits
from vla_rl.experience.supervised import joined


@dataclass(frozen=True)
class DemonstratorConfig:
    """How much a person demonstrates."""

    max_share: float = 0.2  # of all steps so far; an episode is demonstrated while less was
    steps: int = 10_000  # after so many no further episode is

    def __post_init__(self) -> None:
        check_limits(self, max_share=(0, 1), steps=(0, math.inf))


class DemonstratedEnv:
    """``env`` in which a person does some episodes from beginning to end (``VecEnv``), as ``Step.intervened`` says.

    ``expert(obs) -> [E,>=1,D]`` is what the person does, without noise, as in recorded demonstrations.
    """

    def __init__(self, env: VecEnv, expert: Callable[[Observation], np.ndarray], config: DemonstratorConfig) -> None:
        self.env, self.config, self._expert = env, config, expert
        self.spec, self.num_envs = env.spec, env.num_envs
        self._person = np.zeros(env.num_envs, bool)
        self._steps, self._shown = 0, 0
        self._obs: Observation | None = None

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """See ``VecEnv``."""
        self._obs = self.env.reset(env_ids, seeds)
        wanted = self._shown < self.config.steps and self._shown <= self.config.max_share * self._steps
        self._person[on_host(env_ids).astype(np.intp)] = wanted
        return self._obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        wanted, steps = on_host(chunk), []
        for h in range(wanted.shape[1]) if self._person.any() else ():
            assert self._obs is not None
            shown = self._expert(self._obs)[:, 0]
            action = np.where(self._person[:, None], shown, wanted[:, h]).astype(np.float32)
            steps.append(self.env.step(action[:, None], observe))
            self._obs = steps[-1].obs
        step = joined(steps, self._person[:, None]) if steps else self.env.step(chunk, observe)
        self._obs = step.obs
        valid = on_host(step.valid)
        self._steps += int(valid.sum())
        self._shown += int(valid[self._person].sum())
        return step

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
