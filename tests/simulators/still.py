"""A policy for suites whose tasks nobody has learnt here: ``--policy tests.simulators.still:Still``."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.policies.function import BlackBoxPolicy


class Still(BlackBoxPolicy):
    """Zeros, in the longest chunks that are possible."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec, "standing still")
        self._chunk = np.zeros((spec.max_chunk, spec.action_dim), np.float32)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        obs = self.observation(features)
        return self.action_out(np.repeat(self._chunk[None], len(obs.time), 0), len(obs.time)), state
