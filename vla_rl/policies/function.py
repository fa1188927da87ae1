"""Policies without weights: any function of an observation, such as a planner; what only changes another policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.contract.load import load, name_of
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State, with_context
from vla_rl.policies.noise import uniform
from vla_rl.policies.normalization import Affine, action_limits, check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import save_folder


class BlackBoxPolicy:
    """The common part of policies that only map an observation to a chunk: no weights and no exploration.

    The features are the observation itself.  Subclasses define ``act`` and name themselves for messages.
    """

    def __init__(self, spec: EnvSpec, name: str) -> None:
        self.spec, self.name, self.version = spec, name, 0
        self._scale, self._limits = Affine.from_bounds(spec.action), action_limits(spec)

    def encode(self, obs: Observation) -> Features:
        return {name: torch.as_tensor(array) for name, array in obs.arrays().items()}

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    def observation(self, features: Features) -> Observation:
        """The observation, on the host, that :meth:`encode` made ``features`` of."""
        return Observation.of_arrays({name: item.cpu().numpy() for name, item in features.items()})

    def action_out(self, chosen: Array, num_envs: int) -> ActionOut:
        """``chosen`` [E,H,D], clipped to the bounds; raises ContractError for another shape."""
        action = torch.as_tensor(np.asarray(chosen, np.float32))
        if action.dim() != 3 or action.shape[::2] != (num_envs, self.spec.action_dim):
            raise ContractError(
                f"{self.name} chose actions of shape {list(action.shape)}, so nothing was executed; return "
                f"[{num_envs},H,{self.spec.action_dim}], one chunk per environment."
            )
        action = action.clamp(*self._limits)
        return ActionOut(action, self._scale.normalize(action), torch.zeros(len(action)))


class FunctionPolicy(BlackBoxPolicy):
    """``function(obs) -> [E,H,D]`` in physical units, on the host.

    A checkpoint holds ``target``, "module:function".
    """

    def __init__(self, spec: EnvSpec, function: Callable[[Observation], Array], target: str = "") -> None:
        super().__init__(spec, f"the function {target or function!r}")
        self.function, self.target = function, target

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        obs = self.observation(features)
        try:
            chosen = self.function(obs)
        except Exception as error:  # of whoever wrote the function
            raise ContractError(
                f"{self.name} failed ({cause_of(error)}), so nothing was executed; correct it, or name one that reads "
                f"the observations of {self.spec.name!r}."
            ) from error
        return self.action_out(chosen, len(obs.time)), state

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` with the function's name; raises UserError when it has none."""
        if not self.target:
            raise UserError(
                f"the function {self.function!r} was given without a name, so a checkpoint could not find it again; "
                "give 'module:function'."
            )
        kind = name_of(type(self))
        save_folder(Path(folder), {"policy": kind, "function": self.target, "spec": self.spec.to_json()}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> FunctionPolicy:
        """The policy in ``folder``; its function is imported by name, and ``spec`` must fit the recorded one."""
        saved = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        check_same_env(trained, spec or trained)
        return cls(spec or trained, load(saved["function"]), saved["function"])


class Renumbered:
    """A policy of several tasks in an environment with some of them, whose instruction ``i`` is its ``numbers[i]``."""

    def __init__(self, policy: Policy, numbers: list[int]) -> None:
        self.policy, self.numbers = policy, np.array(numbers)
        self.version = policy.version
        self.reads_privileged = bool(getattr(policy, "reads_privileged", False))

    def encode(self, obs: Observation) -> Features:
        return self.policy.encode(replace(obs, task=self.numbers[obs.task]))

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        return with_context(self.policy, features, state, generator)

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.policy.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        return self.policy.act(features, state, mode, generator)


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

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        return with_context(self.base, features, state, generator)

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
