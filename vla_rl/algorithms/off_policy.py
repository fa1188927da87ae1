"""What TD3, SAC and their kin share: a memory, an ensemble of critics with slow targets, and when to learn how much.

Every head is regressed on its own (a mean over heads inside the square would leave all but one direction between them
undetermined); targets take the least value of a random subset of the target heads, drawn without replacement (Chen et
al. 2021, REDQ, arXiv 2101.05982).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import OneProcess, ReplayBuffer, Rollout, Transitions
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import ReparametrisedPolicy, public
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig


@dataclass(frozen=True)
class OffPolicyConfig:
    """When and how much is learnt from the memory, and the critics."""

    batch: int = 256
    utd_ratio: float = 0.25  # gradient steps of the critics per decision that is collected
    learning_starts: int = 1000  # decisions to collect before the first step
    critic_warmup: int = 500  # first steps, which train the critics only
    policy_delay: int = 2  # steps of the critics per step of the actor
    num_critics: int = 10
    num_min_q: int = 2  # target heads, of which the least value counts
    critic: HeadConfig = field(default_factory=HeadConfig)
    lr: float = 3e-4  # of the actor
    critic_lr: float = 3e-4
    tau: float = 0.005  # how far the targets follow at every step
    grad_norm: float = 10.0
    value_bounds: tuple[float, float] | None = None  # targets are kept within, where the returns are known to be
    offline_steps: int = 0  # steps from recorded data alone, before the first decision is collected

    @property
    def learner(self) -> type[OffPolicy]:
        """The class with these numbers."""
        raise NotImplementedError

    def build(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        generator: torch.Generator,
    ) -> OffPolicy:
        """The learner with these numbers."""
        return self.learner(policy, parameters, critic, replay, self, generator)


class OffPolicy:
    """A ``Learner``: ``update(rollout)`` remembers it, then improves critics and policy from the memory.

    A subclass says what the critics are regressed on (:meth:`target`) and what the actor minimises
    (:meth:`actor_loss`).  Raises UserError when the policy's decisions are not differentiable and NonFiniteError when a
    loss or gradient is not finite; the weights are then still those of the last finite step.
    """

    def __init__(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        config: OffPolicyConfig,
        generator: torch.Generator,
    ) -> None:
        if not isinstance(policy, ReparametrisedPolicy):
            raise UserError(
                f"{type(self).__name__} needs a policy with rsample and judged (ReparametrisedPolicy) but "
                f"{type(policy).__name__} lacks them, so no gradient could reach it; add them or choose an algorithm "
                "that needs likelihoods only."
            )
        if not 1 <= config.num_min_q <= critic.num_critics:
            raise UserError(
                f"num_min_q {config.num_min_q} exceeds the {critic.num_critics} critics or is below 1, so no target "
                f"can be formed; choose 1 to {critic.num_critics}."
            )
        self.policy, self.critic, self.replay, self.config = policy, critic, replay, config
        self.parameters, self.generator = dict(parameters), generator
        # The others, statistics, are published and kept like weights but set once.
        self.learnt = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._of_critic = {name: item for name, item in critic.named_parameters() if item.requires_grad}
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.learnt.values(), lr=config.lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self._of_critic.values(), lr=config.critic_lr, fused=True)
        self.decisions, self.steps, self.update_debt = 0, 0, 0.0

    @property
    def lr(self) -> float:
        """The actor's."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    # -- learning ---------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Remember ``rollout`` and take the gradient steps that its decisions allow."""
        self.replay.add(rollout)
        new = int(rollout.valid.any(-1).sum())
        before, self.decisions = self.decisions, self.decisions + new
        if self.decisions >= self.config.learning_starts:
            self.update_debt += self.config.utd_ratio * (self.decisions - max(before, self.config.learning_starts - 1))
        metrics = {"decisions": float(new), "replay": float(len(self.replay))}
        if not len(self.replay):
            return metrics
        found = []
        while self.update_debt >= 1:
            self.update_debt -= 1
            found.append(self.step())
        return {**metrics, "steps": float(self.steps), **mean(found)}

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Take ``steps`` steps from what the memory holds already; ``report(step, metrics)`` after each."""
        for step in range(steps):
            report(step, self.step())

    def step(self) -> dict[str, float]:
        """One gradient step of the critics and, when it is its turn, one of the actor."""
        batch = self.replay.sample(self.config.batch, self.generator)
        if self.steps == 0:
            self._calibrate()
        info = self.critic_step(batch)
        turn = self.steps % self.config.policy_delay == 0
        if turn and self.steps >= self.config.critic_warmup:
            info |= self.actor_step(batch)
        self.soft_update()
        self.steps += 1
        return info

    def critic_step(self, batch: Transitions) -> dict[str, float]:
        """Regress every head on the same targets."""
        target = self.target(batch)
        if self.config.value_bounds:
            target = target.clamp(*self.config.value_bounds)
        value = self.critic(batch.features, self.critic_action(batch))
        loss = (value - target).square().mean(1).sum() + self.regularizer(batch, value)
        self.optimizer_step(self.critic_optimizer, loss, self._of_critic, "critic")
        spread = value.detach().std(0).mean() if len(value) > 1 else torch.zeros(())
        return {"critic_loss": float(loss.detach()), "value": float(value.detach().mean()), "spread": float(spread)}

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        """Descend :meth:`actor_loss`; the critics only pass gradients on."""
        for parameter in self._of_critic.values():
            parameter.requires_grad_(False)
        loss, info = self.actor_loss(batch)
        for parameter in self._of_critic.values():
            parameter.requires_grad_(True)
        self.optimizer_step(self.optimizer, loss, self.learnt, "policy")
        return {"actor_loss": float(loss.detach()), **info}

    # -- what a subclass says ---------------------------------------------------------------------------------------

    def target(self, batch: Transitions) -> Tensor:
        """What ``Q(o, a)`` [B] should be; no gradient passes."""
        raise NotImplementedError

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        """What the actor minimises, and metrics."""
        raise NotImplementedError

    def critic_action(self, batch: Transitions) -> Tensor:
        """The recorded decisions [B,A] as the critics see them."""
        return self.policy.critic_action(batch.features, batch.sample, batch.executed)

    def regularizer(self, batch: Transitions, value: Tensor) -> Tensor:
        """What else the critics minimise, given their ``value`` [K,B] of the batch."""
        return value.new_zeros(())

    # -- parts ------------------------------------------------------------------------------------------------------

    def min_target_q(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """The least value [B] of a random subset of the target heads."""
        chosen = torch.randperm(self.critic.num_critics, generator=self.generator)[: self.config.num_min_q]
        lowest: Tensor = self.target_critic(features, action)[chosen].amin(0)
        return lowest

    @torch.no_grad()
    def soft_update(self) -> None:
        """Move the targets a little towards the critics."""
        for slow, fast in zip(self.target_critic.parameters(), self.critic.parameters(), strict=True):
            slow.lerp_(fast, self.config.tau)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Mapping[str, nn.Parameter], who: str
    ) -> None:
        """One optimiser step on ``loss``."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), self.config.grad_norm))
        if not torch.isfinite(loss) or norm != norm or norm == float("inf"):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "loss")
            raise NonFiniteError(
                f"the {who} gradient of {bad!r} is not finite at step {self.steps}, so the step was not taken; go on "
                "from the last checkpoint with a lower learning rate."
            )
        optimizer.step()

    def input_normalizers(self) -> list[Any]:
        """What standardises its inputs."""
        return [self.critic, self.target_critic, self.policy]

    def _calibrate(self) -> None:
        """Standardise what critics and policy see by what is in the memory."""
        features = self.replay.sample(4096, self.generator).features
        for part in self.input_normalizers():
            calibrate = getattr(part, "calibrate", None)
            if callable(calibrate):
                calibrate(features if part is not self.policy else public(dict(features)), OneProcess())

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimisers, memory, generator and counters (see ``Resumable``)."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "replay": self.replay.state_dict(),
            "generator": self.generator.get_state(),
            "counters": [self.decisions, self.steps, self.update_debt],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        for name in ("critic", "target_critic", "optimizer", "critic_optimizer", "replay"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.decisions, self.steps, self.update_debt = state["counters"]


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Lend ``values`` to ``parameters`` within the block; for what needs no gradient."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over those ``rows`` that have it."""
    names = sorted({name for row in rows for name in row})
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(items) / len(items) for name, items in values.items()}
