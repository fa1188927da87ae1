"""A policy that now and then does something else: failures and near-successes for a world model to learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.normalization import Affine, action_limits


class EpsilonRandomPolicy:
    """``base``, but a ``share`` of all decisions is one random action, held for the whole chunk; 1 is random play.

    What it does has no likelihood, so nobody can be trained on it by a policy gradient (``logprob`` is 0).
    """

    def __init__(self, base: Policy, spec: EnvSpec, share: float) -> None:
        """Raises UserError for a share outside [0, 1]."""
        if not 0.0 <= share <= 1.0:
            raise UserError(f"a share of {share} of the decisions cannot be random; choose one from 0 to 1.")
        self.base, self.share, self.version = base, share, base.version
        self._scale, self._limits = Affine.from_bounds(spec.action), action_limits(spec)

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    def initial_state(self, num_envs: int) -> State:
        return self.base.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.base.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        out, state = self.base.act(features, state, mode, generator)
        rows, horizon, entries = out.action.shape
        wild = 2.0 * torch.rand(rows, 1, entries, generator=generator) - 1.0
        slips = (torch.rand(rows, 1, 1, generator=generator) < self.share).expand(rows, horizon, entries)
        action = torch.where(slips, self._scale.unnormalize(wild).clamp(*self._limits), torch.as_tensor(out.action))
        return replace(out, action=action, sample=self._scale.normalize(action), logprob=torch.zeros(rows)), state
