"""A world model in the place of a simulator, and statistics of a policy's imagined rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np
import torch

from vla_rl.contract.env import VecEnv, on_host
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.driver import Driver
from vla_rl.recipes import world_models


class ImaginedEnvFactory:
    """Makes imagined environments (an ``EnvFactory``), and renews all of them when the world model was trained."""

    def __init__(
        self,
        model: world_models.WorldModel,
        initial_states: world_models.Pool,
        limits: world_models.Limits | None,
        config: world_models.ImaginationConfig,
    ) -> None:
        """``limits`` None: uncertainty ends no rollout; ``config`` is that of the training environments."""
        self.model, self.initial_states, self.limits, self.config = model, initial_states, limits, config
        self._made: WeakSet[world_models.ImaginedEnv] = WeakSet()  # those that are still in use

    def make(self, num_envs: int) -> world_models.ImaginedEnv:
        """``num_envs`` imagined environments to evaluate in: every rollout is a whole episode."""
        return self._make(num_envs, replace(self.config, keyframe_share=0.0))

    def make_training(self, num_envs: int) -> VecEnv:
        """``num_envs`` imagined environments for reinforcement learning."""
        return self._make(num_envs, self.config)

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`."""
        return world_models.imagined_spec(self.model, self.config)

    def renew(
        self,
        initial_states: world_models.Pool,
        limits: world_models.Limits,
        config: world_models.ImaginationConfig,
    ) -> None:
        """Use other initial states, limits and numbers from now on, after the world model was trained further."""
        self.initial_states, self.limits, self.config = initial_states, limits, config
        for env in self._made:
            env.renew(initial_states, limits, config)

    def _make(self, num_envs: int, config: world_models.ImaginationConfig) -> world_models.ImaginedEnv:
        env = world_models.make_env(self.model, self.initial_states, num_envs, self.limits, config)
        self._made.add(env)
        return env


@dataclass(frozen=True)
class RolloutStatistics:
    """Imagined rollouts of a policy: shares of successes and of truncations by uncertainty, inverse-dynamics error."""

    success: float
    uncertain: float
    inverse_dynamics_error: float


def measure_rollouts(
    env: world_models.ImaginedEnv,
    model: world_models.WorldModel,
    policy: Policy,
    seeds: Sequence[int],
    noise: torch.Generator,
) -> RolloutStatistics:
    """Play one episode of ``policy``, exploring, in each environment of ``env``."""
    errors: list[torch.Tensor] = []

    def compare(before: torch.Tensor, after: torch.Tensor, actions: torch.Tensor) -> None:
        errors.append(model.inverse_dynamics_error(before, after, actions))

    env.on_call = compare
    driver = Driver(env, policy, noise)
    driver.start(seeds)
    *_, last = driver.until_done()
    error = float(torch.cat(errors).mean()) if errors else 0.0
    uncertain = float(np.mean([cause == "uncertainty" for cause in last.step.cause]))
    return RolloutStatistics(float(on_host(last.step.success).mean()), uncertain, error)
