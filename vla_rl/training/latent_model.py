"""Trains a latent model of decisions beside an off-policy learner, from the decisions that it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import ReplayBuffer, Transitions
from vla_rl.contract.errors import NonFiniteError
from vla_rl.contract.policy import ReparametrisedPolicy
from vla_rl.experience.mixture import Mixture, concatenate
from vla_rl.experience.replay import Replay

_GRAD_NORM = 10.0


class DecisionModel(Protocol):
    """What is trained, such as ``world_models.latent.LatentModel``."""

    def calibrate(self, features: Mapping[str, Tensor]) -> None: ...

    def losses(
        self,
        features: Mapping[str, Tensor],
        action: Tensor,
        reward: Tensor,
        ended: Tensor,
        next_features: Mapping[str, Tensor],
        value: Tensor,
        next_value: Tensor,
    ) -> dict[str, Tensor]: ...

    def total(self, losses: Mapping[str, Tensor]) -> Tensor: ...

    def update_slow_encoder(self) -> None: ...


class LatentModelTrainer:
    """Steps of Adam on batches one decision ahead; values are those of the critics for the actor's own decision."""

    def __init__(
        self,
        model: DecisionModel,
        parameters: list[nn.Parameter],
        policy: ReparametrisedPolicy,
        critic: nn.Module,
        lr: float,
        generator: torch.Generator,
    ) -> None:
        self.model, self.policy, self.critic, self.generator = model, policy, critic, generator
        self.parameters = [one for one in parameters if one.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, fused=True)
        self.steps = 0

    def step(self, replay: ReplayBuffer, size: int) -> dict[str, float]:
        """One step; raises NonFiniteError, with the weights as they were, when a loss is not finite."""
        batch = one_decision_ahead(replay, size, self.generator)
        if not self.steps:
            self.model.calibrate(one_decision_ahead(replay, 4096, self.generator).features)
        action = self.policy.critic_action(batch.features, batch.sample, batch.executed)
        values = [self._value(features) for features in (batch.features, batch.next_features)]
        losses = self.model.losses(
            batch.features, action, batch.reward, batch.discount == 0, batch.next_features, *values
        )
        total = self.model.total(losses)
        if not torch.isfinite(total):
            raise NonFiniteError(
                f"the loss of the latent model is not finite at step {self.steps}, so the step was not taken; lower "
                "its learning rate."
            )
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.parameters, _GRAD_NORM)
        self.optimizer.step()
        self.model.update_slow_encoder()
        self.steps += 1
        return {f"model/{name}": float(loss.detach()) for name, loss in losses.items()}

    @torch.no_grad()
    def _value(self, features: Mapping[str, Tensor]) -> Tensor:
        action = self.policy.rsample(dict(features), self.generator).action
        found: Tensor = self.critic(features, action).mean(0)
        return found


def one_decision_ahead(replay: ReplayBuffer, size: int, generator: torch.Generator) -> Transitions:
    """``size`` decisions of ``replay``, in its shares, each with what followed it at once."""
    if isinstance(replay, Mixture):
        counts = replay.counts(size)
        return concatenate(
            [one_decision_ahead(replay.parts[name], count, generator) for name, count in counts.items() if count]
        )
    assert isinstance(replay, Replay), f"a {type(replay).__name__} cannot be asked for single decisions"
    slots = replay.decisions()
    return replay.transitions(slots[torch.randint(len(slots), (size,), generator=generator).to(slots.device)], 1)
