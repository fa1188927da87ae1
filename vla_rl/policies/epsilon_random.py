"""A policy that takes random actions with some probability: failures and near-successes to train a world model on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State
from vla_rl.policies.noise import uniform
from vla_rl.policies.normalization import Affine


class EpsilonRandomPolicy:
    """``base``, but with probability ``random_action_prob`` a decision is one random action, held for the whole chunk.

    The mixture has no recorded density (``logprob`` is 0), so policy gradients cannot train it.
    """

    def __init__(self, base: Policy, spec: EnvSpec, random_action_prob: float) -> None:
        """Raises UserError for a probability outside [0, 1]."""
        if not 0.0 <= random_action_prob <= 1.0:
            raise UserError(
                f"random_action_prob is {random_action_prob}, which is no probability; choose one from 0 to 1."
            )
        self.base, self.random_action_prob, self.version = base, random_action_prob, base.version
        self._scale, self._discrete = Affine.from_bounds(spec.action), spec.discrete
        bounds, size = (spec.action.low, spec.action.high), spec.action_dim
        self._limits = [torch.as_tensor(bound, dtype=torch.float32).expand(size) for bound in bounds]

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    def initial_state(self, num_envs: int) -> State:
        return self.base.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.base.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        out, state = self.base.act(features, state, mode, generator)
        chosen = torch.as_tensor(out.action)
        num_envs, _, dims = chosen.shape
        like = chosen.float()
        drawn = uniform((num_envs, 1, dims), generator, like=like)
        is_random = uniform((num_envs, 1, 1), generator, like=like) < self.random_action_prob
        action = torch.where(is_random, self._held(drawn).to(chosen), chosen)
        sample = self._scale.normalize(action.float())
        return replace(out, action=action, sample=sample, logprob=like.new_zeros(num_envs)), state

    def _held(self, drawn: Tensor) -> Tensor:
        """The action, in physical units or whole numbers, of ``drawn``, uniform in [0, 1)."""
        low, high = (bound.to(drawn) for bound in self._limits)
        if self._discrete:
            return (low + (drawn * (high - low + 1.0)).floor()).clamp(low, high)
        return self._scale.unnormalize(2.0 * drawn - 1.0).clamp(low, high)
