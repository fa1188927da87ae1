"""Environments that deliver zeros in the shapes of a spec: what a run's memory depends on, without a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.env import Array, Observation, Observe, Step, VecEnv
from vla_rl.contract.spec import ArraySpec, EnvSpec


@dataclass(frozen=True)
class ShapesEnvs:
    """An ``EnvFactory``: episodes of ``training`` last as long as they can, those of an evaluation one decision."""

    evaluation: EnvSpec
    training: EnvSpec

    def spec(self) -> EnvSpec:
        return self.evaluation

    def make(self, num_envs: int) -> VecEnv:
        return ShapesEnv(self.evaluation, num_envs, 1)

    def make_training(self, num_envs: int) -> VecEnv:
        return ShapesEnv(self.training, num_envs, self.training.time_limit)


class ShapesEnv:
    """A ``VecEnv`` of zeros.  After ``limit`` actions every other episode succeeds and the rest are truncated."""

    def __init__(self, spec: EnvSpec, num_envs: int, limit: int) -> None:
        self.spec, self.num_envs, self.limit = spec, num_envs, limit
        self.time = np.zeros(num_envs, np.int64)

    def reset(self, env_ids: Array, seeds: Array) -> Observation:
        self.time[env_ids] = 0
        return self._observation()

    def step(self, chunk: Array, observe: Observe = "last") -> Step:
        width = len(chunk[0])
        left = (self.limit - self.time)[:, None]
        valid = np.arange(width) < left
        self.time = np.minimum(self.time + width, self.limit)
        done, good = self.time >= self.limit, np.arange(self.num_envs) % 2 == 0
        reward = np.zeros((self.num_envs, width), np.float32)
        reward[(done & good)[:, None] & (np.arange(width) == left - 1)] = 1.0
        causes = np.where(done, np.where(good, "success", "time_limit"), "")
        obs = self._observation()
        return Step(
            obs,
            reward,
            valid,
            terminated=done & good,
            truncated=done & ~good,
            cause=causes.tolist(),
            success=done & good,
            executed=np.zeros((self.num_envs, width, *self.spec.action.shape), self.spec.action.dtype),
            intervened=np.zeros((self.num_envs, width), bool),
            frames=(obs,) * width if observe == "all" else (),
        )

    def close(self) -> None:
        """Nothing is open."""

    def _observation(self) -> Observation:
        return Observation(
            self._zeros(self.spec.images),
            np.zeros((self.num_envs, *self.spec.state.shape), self.spec.state.dtype),
            np.zeros(self.num_envs, np.int64),
            self.time.copy(),
            self._zeros(self.spec.extras),
        )

    def _zeros(self, arrays: Mapping[str, ArraySpec]) -> dict[str, Array]:
        return {name: np.zeros((self.num_envs, *item.shape), item.dtype) for name, item in arrays.items()}
