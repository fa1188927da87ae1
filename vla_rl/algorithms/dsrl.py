"""DSRL: soft actor-critic over the latent noise of a frozen flow policy (Wagenmaker et al. 2025, arXiv 2506.15799).

``g`` is the frozen decoder, ``w`` the noise that the policy chooses, and ``d = gamma^n (1 - terminated)`` with the
actual number n of executed actions.  As SAC (``sac.py``) in ``w`` (:class:`DSRL`):

    y     = R + d [min_{k in M} Q'_k(o', w') - alpha log pi(w'|o')],    w' ~ pi(.|o')
    L_Q   = sum_k E (Q_k(o, w) - y)^2
    L_pi  = E [alpha log pi(w|o) - mean_k Q_k(o, w)]

or noise-aliased (:class:`NoiseAliased`), with critics Q^A of actions, which learn from any (o, a), and Q^W of noise:

    y     = R + d min_{k in M} Q^A'_k(o', g(o', w'))
    L_W   = sum_k E (Q^W_k(o, w) - Q^A_k(o, g(o, w)))^2,    w ~ N(0, I) clipped to the policy's range
    L_pi  = E [alpha log pi(w|o) - mean_k Q^W_k(o, w)]

Deviations: discounts count the executed actions (the public code has the same exponent for every chunk); ``w`` is
clipped in the distillation because the actor stays within +-m but often reaches the bounds, where N(0, I) has few
samples with all entries inside; every critic of Q^W learns from its own critic of Q^A, which keeps their spread.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.decisions import mean
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.config import at_least
from vla_rl.contract.errors import UserError
from vla_rl.policies.latent_noise import SquashedLatent
from vla_rl.policies.noise import normal


@dataclass(frozen=True)
class DSRLConfig(SACConfig):
    """SAC's fields; the entropy is that of ``w / m``, ``log 2`` per entry for uniform noise."""

    temperature: float = 0.1
    target_entropy: float = 0.0


class DSRL(SAC, config=DSRLConfig):
    """DSRL-SAC: its critics evaluate noise, so they learn only from decisions of a latent-noise policy."""

    config: DSRLConfig

    def critic_action(self, batch: Transitions) -> Tensor:
        """``w / m``; raises UserError for a decision whose noise is unknown."""
        no_sample = (batch.sample == 0).flatten(1).all(1)  # a demonstration has only the action
        unknown = batch.intervened | no_sample
        if unknown.any():
            raise UserError(
                f"{int(unknown.sum())} of {len(unknown)} decisions in a batch are demonstrations or interventions "
                "with unknown noise, so critics of noise cannot learn from them; set their share to 0, or choose the "
                "noise-aliased DSRL."
            )
        return super().critic_action(batch)


@dataclass(frozen=True)
class NoiseAliasedConfig(DSRLConfig):
    """``distillations``: steps of Q^W per step of Q^A."""

    distillations: int = at_least(10, 0)


class NoiseAliased(DSRL, config=NoiseAliasedConfig):
    """DSRL-NA: ``critic`` evaluates normalised actions and learns from demonstrations too, ``noise_critic`` noise."""

    config: NoiseAliasedConfig
    policy: SquashedLatent
    resumed = (*DSRL.resumed, "noise_critic", "noise_optimizer")
    rolled_back = (*DSRL.rolled_back, "noise_critic")

    def require_policy(self, policy: object) -> None:
        if not isinstance(policy, SquashedLatent):
            raise UserError(
                f"{type(self).__name__} needs a policy that decodes noise (SquashedLatent) but {type(policy).__name__} "
                "does not, so values of actions could not be those of noise; choose DSRL or another algorithm."
            )
        if policy.latent != policy.horizon * policy.spec.action_dim:
            raise UserError(
                f"{type(policy.base).__name__} starts from noise of {policy.latent} chosen entries but executes chunks "
                f"of {policy.horizon} x {policy.spec.action_dim}, so critics of actions and of noise cannot share "
                "their form; choose DSRLConfig."
            )

    def prepare(self) -> None:
        super().prepare()
        self.noise_critic = copy.deepcopy(self.critic)
        self._noise_critic_parameters = {
            name: item for name, item in self.noise_critic.named_parameters() if item.requires_grad
        }
        rate = self.config.critic_lr
        self.noise_optimizer = torch.optim.Adam(self._noise_critic_parameters.values(), lr=rate, fused=True)

    def critic_action(self, batch: Transitions) -> Tensor:
        """The executed actions, normalised, the policy's and others'."""
        return self.policy.normalized(batch.executed)

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        noise = self.policy.rsample(batch.next_features, self.generator).action
        action = self.policy.decode(batch.next_features, self.policy.config.magnitude * noise)
        return batch.reward + batch.discount * self.min_target_q(batch.next_features, action)

    def critic_step(self, batch: Transitions) -> dict[str, float]:
        info = super().critic_step(batch)
        return info | mean([self.distil(batch.features) for _ in range(self.config.distillations)])

    def distil(self, features: Mapping[str, Tensor]) -> dict[str, float]:
        """One regression step of every critic of Q^W on its critic of Q^A, at newly drawn noise."""
        magnitude, size = self.policy.config.magnitude, len(next(iter(features.values())))
        drawn = normal((size, self.policy.latent), self.generator, like=self.policy.action_low)
        w = drawn.clamp(-magnitude, magnitude)
        with torch.no_grad():
            value = self.critic(features, self.policy.decode(dict(features), w))
        loss = (self.noise_critic(features, w / magnitude) - value).square().mean(1).sum()
        self.optimizer_step(self.noise_optimizer, loss, self._noise_critic_parameters, "noise critic")
        return {"critic/distillation_loss": float(loss.detach())}

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        for parameter in self._noise_critic_parameters.values():
            parameter.requires_grad_(False)
        info = super().actor_step(batch)
        for parameter in self._noise_critic_parameters.values():
            parameter.requires_grad_(True)
        return info

    def actor_objective(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        return self.noise_critic(features, action).mean(0)

    def input_normalizers(self) -> list[Any]:
        return [*super().input_normalizers(), self.noise_critic]
