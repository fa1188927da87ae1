"""An algorithm: REINFORCE with a learned baseline (Williams 1992, Machine Learning 8; Sutton and Barto 2018, 13.4).

    grad J = E[ grad log pi(c | o) (G - V(o)) ],    L_V = 1/2 E[ (V(o) - G)^2 ]

``c`` is a chunk and ``G`` its return: the rewards until the episode ends, discounted per low-level action, or until the
rollout ends and ``V`` from there on (GAE with lambda = 1).  Deviation: the advantages of a rollout are normalised.

It is one file, ``vla_rl/algorithms/reinforce.py``: a ``Learner`` that takes any rollout; its ``parameters`` and
``lr`` are for the ``Loop``.  One line of a config lets ``vla-rl train`` use it instead of PPO:

    RLConfig(sampler, algorithm=ReinforceConfig())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.ppo import gae, normalize
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.policy import LikelihoodPolicy


@dataclass(frozen=True)
class ReinforceConfig:
    """One step of the policy per rollout, several of its baseline."""

    gamma: float = 0.99
    lr: float = 0.05
    critic_lr: float = 0.01
    critic_steps: int = 10

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> Reinforce:
        """The learner with these numbers; it draws nothing at random."""
        return Reinforce(policy, parameters, critic, self, reducer)


class Reinforce:
    """A ``Learner`` for any policy whose samples have a likelihood."""

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: ReinforceConfig,
        reducer: Reducer,
    ) -> None:
        self.reducer = reducer
        self.policy, self.parameters, self.critic, self.config = policy, dict(parameters), critic, config
        self.lr = config.lr
        self.optimizer = torch.optim.Adam(self.parameters.values())
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=config.critic_lr)

    def update(self, rollout: Rollout) -> dict[str, float]:
        advantage, returns = self._returns(rollout)
        used = rollout.valid.any(-1) & ~rollout.intervened.any(-1)  # what the policy itself did
        advantage = normalize(advantage, used, self.reducer)[used]
        features = {name: item[:-1][used] for name, item in rollout.features.items()}
        aux = {name: item[used] for name, item in rollout.aux.items()}
        for _ in range(self.config.critic_steps):
            value_loss = 0.5 * (self.critic(features) - returns[used]).square().mean()
            _step(self.critic_optimizer, value_loss)
        loss = -(self.policy.log_prob(features, rollout.sample[used], aux).logprob * advantage).mean()
        self.optimizer.param_groups[0]["lr"] = self.lr
        _step(self.optimizer, loss)
        return {"policy/loss": float(loss.detach()), "critic/loss": float(value_loss.detach())}

    def state_dict(self) -> dict[str, Any]:
        """With this and the next method a run can be resumed; the loop saves what they say after every iteration."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        parts = (self.critic, self.optimizer, self.critic_optimizer)
        return {"weights": weights, "rate": self.lr, "parts": [part.state_dict() for part in parts]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["weights"][name])
        self.lr = state["rate"]
        for part, saved in zip((self.critic, self.optimizer, self.critic_optimizer), state["parts"], strict=True):
            part.load_state_dict(saved)

    @torch.no_grad()
    def _returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """``G - V`` and ``G`` [T,E]; a truncated episode is bootstrapped from the value of its own last observation."""
        value = self.critic(rollout.features)
        next_value = value[1:].clone()
        next_value[tuple(rollout.final_index.T)] = self.critic(rollout.final_features)
        ends = rollout.terminated, rollout.truncated
        return gae(rollout.reward, rollout.valid, *ends, value[:-1], next_value, self.config.gamma, 1.0)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
