"""SAC (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905) on an ensemble of critics (Chen et al. 2021, REDQ).

    y       = R + gamma^m (1 - terminated) [min_{k in M} Q'_k(o', a') - alpha log pi(a'|o')],  a' ~ pi(.|o')
    L_Q     = sum_k E (Q_k(o, a) - y)^2
    L_pi    = E [alpha log pi(a|o) - mean_k Q_k(o, a)],  a ~ pi(.|o)
    L_alpha = alpha E [-log pi(a|o) - target entropy]

R is the n-step return of m actions and o' the observation after them.  Deviations: R lacks the entropies of the
decisions between o and o', which change after it was recorded; the actor maximises the mean of all critics, as in REDQ,
where SAC takes the minimum of two.

RLPD (Ball et al. 2023, arXiv 2302.02948): SAC on batches that are half recorded data, with regularised critics.

It differs from SAC in four ways, none of them in a loss:

- half of each batch is demonstrations or other recorded data, the other half the run's own: a ``Mixture`` of replay
  buffers with equal shares;
- critics have LayerNorm, which bounds the values of untried actions (``QEnsemble`` always has it);
- an ensemble of ten critics, of which a random two without replacement give the target;
- many critic steps per decision, followed by one actor step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.config import above_zero, at_least


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """The defaults are classic SAC: the minimum of two critics and one gradient step per decision."""

    utd_ratio: float = 1.0
    critic_warmup: int = 0
    policy_delay: int = 1
    num_critics: int = 2
    target_entropy: float = -1.0  # per entry of the action
    temperature: float = above_zero(1.0)  # initial alpha
    temperature_lr: float = at_least(3e-4, 0)  # learning rate of alpha


class SAC(OffPolicy, config=SACConfig):
    """Trains any policy with differentiable decisions that have a density, and the temperature alpha."""

    config: SACConfig
    resumed = (*OffPolicy.resumed, "temperature_optimizer")

    def prepare(self) -> None:
        super().prepare()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(self.config.temperature)))
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=self.config.temperature_lr)

    @property
    def temperature(self) -> Tensor:
        """alpha, without gradient."""
        return self.log_temperature.detach().exp()

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        next_decision = self.policy.rsample(batch.next_features, self.generator)
        value = self.min_target_q(batch.next_features, next_decision.action) - self.temperature * next_decision.logprob
        return batch.reward + batch.discount * value

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        decision = self.policy.rsample(batch.features, self.generator)
        value = self.actor_objective(batch.features, decision.action)
        entropy = -float(decision.logprob.detach().mean()) / decision.action.shape[-1]
        return (self.temperature * decision.logprob - value).mean(), {"policy/entropy": entropy}

    def actor_objective(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """The values [B] that the actor maximises: the mean of all critics."""
        return self.critic(features, action).mean(0)

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        """A step of the actor, then one of the temperature; the metric ``entropy`` is per entry of the action."""
        info = super().actor_step(batch)
        loss = self.log_temperature.exp() * (info["policy/entropy"] - self.config.target_entropy)
        self.optimizer_step(self.temperature_optimizer, loss, {"log_temperature": self.log_temperature}, "temperature")
        return {**info, "policy/temperature": float(self.temperature)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_temperature": self.log_temperature.detach()}

    def best_state(self) -> dict[str, Any]:
        return {**super().best_state(), "log_temperature": self.log_temperature.detach().clone()}

    def roll_back(self, state: dict[str, Any], lr_factor: float) -> None:
        super().roll_back(state, lr_factor)
        self.log_temperature.data.copy_(state["log_temperature"])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_temperature.copy_(state["log_temperature"])


@dataclass(frozen=True)
class RLPDConfig(SACConfig):
    """RLPD's defaults; the replay buffer defines the mixture.

    Deviation: every critic step samples its own batch, and the actor step uses the last of them.
    """

    num_critics: int = 10
    num_min_q: int = 2
    learning_starts: int = 5000
    utd_ratio: float = 20.0
    policy_delay: int = 20
    target_entropy: float = -0.5
