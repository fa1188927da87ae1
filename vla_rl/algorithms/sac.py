"""SAC (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905) on an ensemble of critics (Chen et al. 2021, REDQ).

    y       = R + gamma^m (1 - terminated) [min_{k in M} Q'_k(o', a') - alpha log pi(a'|o')],  a' ~ pi(.|o')
    L_Q     = sum_k E (Q_k(o, a) - y)^2
    L_pi    = E [alpha log pi(a|o) - mean_k Q_k(o, a)],  a ~ pi(.|o)
    L_alpha = alpha E [-log pi(a|o) - target entropy]

R is the n-step return of m actions and o' what was seen after them.  Deviations: the entropies of the decisions between
o and o' are left out of R, which was recorded before they were known; the actor follows the mean of all heads, as in
REDQ, where SAC takes the least of its two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from vla_rl.contract.batch import ReplayBuffer, Transitions
from vla_rl.contract.policy import ReparametrisedPolicy
from vla_rl.policies.critics import QEnsemble


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """The numbers of SAC; with two heads, of which the least counts, and a step per decision it is the classic one."""

    utd_ratio: float = 1.0
    critic_warmup: int = 0
    policy_delay: int = 1
    num_critics: int = 2
    target_entropy: float = -1.0  # per entry of the action
    temperature: float = 1.0  # alpha at first
    temperature_lr: float = 3e-4  # its learning rate

    @property
    def learner(self) -> type[SAC]:
        return SAC


class SAC(OffPolicy):
    """Trains any policy whose decisions have a density and are differentiable, and its temperature alpha."""

    config: SACConfig

    def __init__(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        config: SACConfig,
        generator: torch.Generator,
    ) -> None:
        super().__init__(policy, parameters, critic, replay, config, generator)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature)))
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=config.temperature_lr)

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
        made = self.policy.rsample(batch.features, self.generator)
        value = self.actor_objective(batch.features, made.action)
        entropy = -float(made.logprob.detach().mean()) / made.action.shape[-1]
        return (self.temperature * made.logprob - value).mean(), {"entropy": entropy}

    def actor_objective(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """What the actor maximises, [B]: the mean of all heads."""
        value: Tensor = self.critic(features, action).mean(0)
        return value

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        """A step of the actor, then one of the temperature; metrics have the entropy per entry of the action."""
        info = super().actor_step(batch)
        loss = self.log_temperature.exp() * (info["entropy"] - self.config.target_entropy)
        self.optimizer_step(self.temperature_optimizer, loss, {"log_temperature": self.log_temperature}, "temperature")
        return {**info, "temperature": float(self.temperature)}

    def state_dict(self) -> dict[str, Any]:
        own = {"log_temperature": self.log_temperature.detach()}
        return {**super().state_dict(), **own, "temperature_optimizer": self.temperature_optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_temperature.copy_(state["log_temperature"])
        self.temperature_optimizer.load_state_dict(state["temperature_optimizer"])
