"""A policy of several tasks in an environment that has only some of them, in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State


class Renumbered:
    """A policy of several tasks in an environment with some of them, whose instruction ``i`` is its ``numbers[i]``."""

    def __init__(self, policy: Policy, numbers: list[int]) -> None:
        self.policy, self.numbers = policy, np.array(numbers)
        self.version = policy.version
        self.reads_privileged = bool(getattr(policy, "reads_privileged", False))

    def encode(self, obs: Observation) -> Features:
        return self.policy.encode(replace(obs, task=self.numbers[obs.task]))

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        """What the policy adds to its features, if it does."""
        add = getattr(self.policy, "context", None)
        return (features, state) if add is None else add(features, state, generator)

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.policy.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        return self.policy.act(features, state, mode, generator)
