"""Residual TD3: ResFiT (Ankile et al. 2025, arXiv 2509.19301) on TD3 (Fujimoto et al. 2018, arXiv 1802.09477).

    y    = R + gamma^m (1 - terminated) min_{k in M} Q'_k(o', clip(pi'(o') + clip(eps, c)))
    L_Q  = sum_k E (Q_k(o, u) - y)^2
    L_pi = -E mean_k Q_k(o, pi(o)) + penalty |pi(o)|^2 + anchor |pi(o) - u|^2

R is the n-step return of m <= n actions and o' the observation after them; o includes the base's action b, also at the
last observation of a truncated episode.  u is the correction, a = b + s u.  The anchor is that of TD3+BC (Fujimoto and
Gu 2021, arXiv 2106.06860): the actor stays near what was tried, and moves on with it.  Deviations: critics evaluate u
and not a (see ``policies/residual.py``); every critic has its own regression loss (``off_policy.py``).

With ``conservative``, L_Q has Cal-QL's penalty as well (``offline.py``), as in PLD (Xiao et al. 2025, arXiv
2511.00091): corrections that nobody tried are worth less than those that were, those of the actor never less than the
episode's return.  The actor is deterministic, so its corrections are those of the target smoothing, all with uniform
density.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, swapped
from vla_rl.algorithms.offline import conservative_penalty, repeated
from vla_rl.contract.batch import Transitions
from vla_rl.contract.config import Checked, at_least
from vla_rl.policies.noise import normal, uniform


@dataclass(frozen=True)
class ConservativeConfig(Checked):
    """Cal-QL's penalty on the values of corrections that were not tried."""

    weight: float = at_least(0.1, 0)  # alpha
    actions: int = at_least(4, 1)  # uniform corrections for every decision, and as many of the actor


@dataclass(frozen=True)
class ResidualTD3Config(OffPolicyConfig):
    """Noise and penalty have the units of the correction."""

    target_noise: float = at_least(0.2, 0)  # std of the target smoothing
    target_clip: float = at_least(0.3, 0)
    penalty: float = at_least(0.0, 0)  # weight of the correction's squared norm
    anchor: float = at_least(0.0, 0)  # weight of its squared distance from the correction that was tried (TD3+BC)
    conservative: ConservativeConfig | None = None  # values of untried corrections are pushed down


class ResidualTD3(OffPolicy, config=ResidualTD3Config):
    """Trains a ``DeterministicResidual``, or any other deterministic policy."""

    config: ResidualTD3Config

    def prepare(self) -> None:
        super().prepare()
        self.target_parameters = {name: parameter.detach().clone() for name, parameter in self.learnt.items()}

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        with swapped(self.learnt, self.target_parameters):
            action = self._smoothed(self.policy.rsample(batch.next_features, self.generator).action)
        return batch.reward + batch.discount * self.min_target_q(batch.next_features, action)

    def _smoothed(self, action: Tensor) -> Tensor:
        """``action`` [B,A] with TD3's clipped noise."""
        noise = self.config.target_noise * normal(action.shape, self.generator, like=action)
        return (action + noise.clamp(-self.config.target_clip, self.config.target_clip)).clamp(-1.0, 1.0)

    def regularizer(self, batch: Transitions, value: Tensor) -> Tensor:
        """The penalty with ``conservative``, given the critics' ``value`` [K,B] of the recorded corrections."""
        if not (config := self.config.conservative):
            return super().regularizer(batch, value)
        features, size = repeated(batch.features, config.actions), value.shape[1]
        with torch.no_grad():
            own = self._smoothed(self.policy.rsample(features, self.generator).action)
            anywhere = 2.0 * uniform(own.shape, self.generator, like=own) - 1.0
            density = own.new_full((size, config.actions), own.shape[-1] * math.log(0.5))
        untried, chosen = (self.critic(features, it).unflatten(1, (size, config.actions)) for it in (anywhere, own))
        penalty = conservative_penalty(untried, chosen, density, value, batch.returns, own.shape[-1])
        return config.weight * penalty.mean(1).sum()

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        action = self.policy.rsample(batch.features, self.generator).action
        norm, loss = action.square().sum(-1).mean(), -self.critic(batch.features, action).mean()
        if self.config.penalty:
            loss = loss + self.config.penalty * norm
        if self.config.anchor:
            tried = self.critic_action(batch).clamp(-1.0, 1.0)
            loss = loss + self.config.anchor * (action - tried).square().sum(-1).mean()
        limited = self.config.penalty or self.config.anchor
        return loss, {"policy/residual_norm": float(norm.detach())} if limited else {}

    @torch.no_grad()
    def soft_update(self) -> None:
        super().soft_update()
        for name, parameter in self.learnt.items():
            self.target_parameters[name].lerp_(parameter, self.config.tau)

    def _return(self, weights: Mapping[str, Tensor]) -> None:
        super()._return(weights)
        for name, parameter in self.learnt.items():
            self.target_parameters[name].copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "target_parameters": self.target_parameters}

    def best_state(self) -> dict[str, Any]:
        target = {name: item.clone() for name, item in self.target_parameters.items()}
        return {**super().best_state(), "target_parameters": target}

    def roll_back(self, state: dict[str, Any], lr_factor: float) -> None:
        super().roll_back(state, lr_factor)
        for name, item in state["target_parameters"].items():
            self.target_parameters[name].copy_(item)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.target_parameters = {
            name: state["target_parameters"][name].to(parameter.device, copy=True)
            for name, parameter in self.learnt.items()
        }
