"""Policies that decide on observations alone: on the present one, or on those of their last decisions as well.

What one observation does not show, such as how fast something moves, several do.  ``n_obs_steps`` is LeRobot's word
(``n_obs_steps`` of its Diffusion Policy) for how many are read.  Deviation: LeRobot's are successive control steps,
ours successive decisions, a chunk apart, which every environment, server and robot shows anyway; with a chunk of one
action they are the same.  As in LeRobot, an episode's first observation stands for those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array, EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, State
from vla_rl.policies.normalization import action_limits

EARLIER = "earlier/"  # before the name of a feature: [B,(n-1)*F], of earlier observations, the oldest first
MOST_STEPS = 100
_FRESH = "fresh"  # bool [E]: whether the next observation is an episode's first


@dataclass(frozen=True)
class ObservationHistory:
    """Features of a policy's last observations, which it keeps in its state.

    n_obs_steps  n: how many observations a decision reads, the present one included
    stride       H: control steps from one to the next: a decision's
    sizes        {name: F} the features [E,F] that are kept
    """

    n_obs_steps: int
    stride: int
    sizes: Mapping[str, int]

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Those of the features that it adds."""
        return {EARLIER + name: (self.n_obs_steps - 1) * size for name, size in self.sizes.items()}

    # -- while acting -----------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """{"earlier/NAME": [E,n-1,F], "fresh": bool [E]}."""
        fresh = torch.ones(num_envs, dtype=torch.bool, device=device)
        kept = {
            EARLIER + name: torch.zeros(num_envs, self.n_obs_steps - 1, size, device=device)
            for name, size in self.sizes.items()
        }
        return {**kept, _FRESH: fresh}

    def reset_state(self, state: State, env_ids: Array) -> State:
        """The histories of ``env_ids`` begin anew with their next observation."""
        fresh = state[_FRESH].clone()
        fresh[torch.as_tensor(env_ids, dtype=torch.long, device=fresh.device)] = True
        return {**state, _FRESH: fresh}

    def context(self, features: Features, state: State) -> tuple[Features, State]:
        """``features`` with those of earlier observations, and the state that has the present one as well."""
        found, after = dict(features), {**state, _FRESH: torch.zeros_like(state[_FRESH])}
        for name in self.sizes:
            now = features[name][:, None]
            kept = torch.where(state[_FRESH][:, None, None], now, state[EARLIER + name].to(now))
            found[EARLIER + name] = kept.flatten(1)
            after[EARLIER + name] = torch.cat([kept[:, 1:], now], 1)
        return found, after

    # -- of recorded episodes ---------------------------------------------------------------------------------------

    def steps_before(self, index: np.ndarray, time: np.ndarray) -> np.ndarray:
        """The control steps [B,n-1] whose observations come before those of ``index`` [B], the oldest first.

        ``time`` [N]: the control steps of whole episodes, one after the other, each of which counts up, from anywhere.
        """
        begins = np.flatnonzero(np.diff(time, prepend=time[:1]) != 1)
        begin = begins[np.searchsorted(begins, index, side="right") - 1]
        ago = np.arange(self.n_obs_steps - 1, 0, -1) * self.stride
        return np.maximum(index[:, None] - ago, begin[:, None])

    def added(self, features: Features, earlier: Features) -> Features:
        """``features`` {name: [B,...]} with ``earlier`` ones {name: [B*(n-1),F]}, those of :meth:`steps_before`."""
        shape = len(next(iter(features.values()))), self.n_obs_steps - 1
        return {**features, **{EARLIER + name: earlier[name].unflatten(0, shape).flatten(1) for name in self.sizes}}


class ObservationPolicy(nn.Module):
    """The common part of policies that carry nothing from one decision to the next but a history, if they have one.

    history  of the observations that it reads besides the present one; None: of none
    action_low, action_high  [D], physical, after :meth:`set_limits`
    """

    history: ObservationHistory | None = None
    action_low: Tensor
    action_high: Tensor

    def set_limits(self, spec: EnvSpec) -> None:
        """Raises ContractError for discrete actions."""
        for name, limit in zip(("action_low", "action_high"), action_limits(spec), strict=True):
            self.register_buffer(name, limit, persistent=False)

    def initial_state(self, num_envs: int) -> State:
        if self.history is None:
            return {}
        return self.history.initial_state(num_envs, next(iter([*self.parameters(), *self.buffers()])).device)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.history.reset_state(state, env_ids) if self.history else state

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        """Adds the features of earlier observations."""
        return self.history.context(features, state) if self.history else (features, state)

    def continue_chunk(self, state: State, env_ids: Array, consumed: Array, delay: Array) -> State:
        """Raises UserError where the next observation comes sooner or later than those that were learnt from."""
        for steps in np.asarray(consumed).tolist() if self.history else ():
            if self.history and steps != self.history.stride:
                raise UserError(
                    f"the policy reads {self.history.n_obs_steps} observations that are {self.history.stride} control "
                    f"steps apart (n_obs_steps) and the next one comes after {steps}, so it would misjudge speeds; "
                    "execute its chunks to their ends (--execution open_loop)."
                )
        return state


def with_history(policy: object, features: Features, time: Array) -> Features:
    """``features`` {name: [N,...]} of whole episodes with those of earlier observations, where ``policy`` reads them.

    ``time`` [N]: control steps since each one's episode began.
    """
    history: ObservationHistory | None = getattr(policy, "history", None)
    if history is None:
        return features
    before = history.steps_before(np.arange(len(time)), np.asarray(time)).flatten()
    return history.added(features, {name: features[name][before] for name in history.sizes})


def history_through(encoder: object, stride: int) -> ObservationHistory | None:
    """That of ``encoder``, if it has one, for a policy on top of it whose decisions are ``stride`` steps apart."""
    found: ObservationHistory | None = getattr(encoder, "history", None)
    return replace(found, stride=stride) if found else None


def history_of(n_obs_steps: int, stride: int, sizes: Mapping[str, int]) -> ObservationHistory | None:
    """The history for a config's ``n_obs_steps``; None for 1."""
    return ObservationHistory(n_obs_steps, stride, dict(sizes)) if n_obs_steps > 1 else None
