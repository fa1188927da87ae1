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

from vla_rl.contract.batch import Memory, OneProcess, Rollout, Transitions
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import ReparametrisedPolicy, public
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig


@dataclass(frozen=True)
class OffPolicyConfig:
    """When and how much is learnt from the memory, and the critics."""

    batch: int = 256
    update_ratio: float = 0.25  # gradient steps of the critics per decision that is collected
    start: int = 1000  # decisions to collect before the first step
    critic_warmup: int = 500  # first steps, which train the critics only
    actor_every: int = 2  # steps of the critics per step of the actor
    heads: int = 10
    subset: int = 2  # target heads, of which the least value counts
    critic: HeadConfig = field(default_factory=HeadConfig)
    learning_rate: float = 3e-4  # of the actor
    critic_learning_rate: float = 3e-4
    target_rate: float = 0.005  # how far the targets follow at every step
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
        memory: Memory,
        generator: torch.Generator,
    ) -> OffPolicy:
        """The learner with these numbers."""
        return self.learner(policy, parameters, critic, memory, self, generator)


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
        memory: Memory,
        config: OffPolicyConfig,
        generator: torch.Generator,
    ) -> None:
        if not isinstance(policy, ReparametrisedPolicy):
            raise UserError(
                f"{type(self).__name__} needs a policy with rsample and judged (ReparametrisedPolicy) but "
                f"{type(policy).__name__} lacks them, so no gradient could reach it; add them or choose an algorithm "
                "that needs likelihoods only."
            )
        if not 1 <= config.subset <= critic.heads:
            raise UserError(
                f"a subset of {config.subset} cannot be drawn from {critic.heads} heads; choose 1 to {critic.heads}."
            )
        self.policy, self.critic, self.memory, self.config = policy, critic, memory, config
        self.parameters, self.generator = dict(parameters), generator
        # The others, statistics, are published and kept like weights but set once.
        self.learnt = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._of_critic = {name: item for name, item in critic.named_parameters() if item.requires_grad}
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.optimiser = torch.optim.Adam(self.learnt.values(), lr=config.learning_rate, fused=True)
        self.critic_optimiser = torch.optim.Adam(self._of_critic.values(), lr=config.critic_learning_rate, fused=True)
        self.decisions, self.steps, self.owed = 0, 0, 0.0

    @property
    def learning_rate(self) -> float:
        """The actor's."""
        return float(self.optimiser.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimiser.param_groups[0]["lr"] = value

    # -- learning ---------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Remember ``rollout`` and take the gradient steps that its decisions allow."""
        self.memory.add(rollout)
        new = int(rollout.valid.any(-1).sum())
        before, self.decisions = self.decisions, self.decisions + new
        if self.decisions >= self.config.start:
            self.owed += self.config.update_ratio * (self.decisions - max(before, self.config.start - 1))
        metrics = {"decisions": float(new), "memory": float(len(self.memory))}
        if not len(self.memory):
            return metrics
        found = []
        while self.owed >= 1:
            self.owed -= 1
            found.append(self.step())
        return {**metrics, "steps": float(self.steps), **mean(found)}

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Take ``steps`` steps from what the memory holds already; ``report(step, metrics)`` after each."""
        for step in range(steps):
            report(step, self.step())

    def step(self) -> dict[str, float]:
        """One gradient step of the critics and, when it is its turn, one of the actor."""
        batch = self.memory.sample(self.config.batch, self.generator)
        if self.steps == 0:
            self._calibrate()
        info = self.critic_step(batch)
        turn = self.steps % self.config.actor_every == 0
        if turn and self.steps >= self.config.critic_warmup:
            info |= self.actor_step(batch)
        self.follow()
        self.steps += 1
        return info

    def critic_step(self, batch: Transitions) -> dict[str, float]:
        """Regress every head on the same targets."""
        target = self.target(batch)
        if self.config.value_bounds:
            target = target.clamp(*self.config.value_bounds)
        value = self.critic(batch.stored, self.judged(batch))
        loss = (value - target).square().mean(1).sum() + self.regulariser(batch, value)
        self.descend(self.critic_optimiser, loss, self._of_critic, "critic")
        spread = value.detach().std(0).mean() if len(value) > 1 else torch.zeros(())
        return {"critic_loss": float(loss.detach()), "value": float(value.detach().mean()), "spread": float(spread)}

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        """Descend :meth:`actor_loss`; the critics only pass gradients on."""
        for parameter in self._of_critic.values():
            parameter.requires_grad_(False)
        loss, info = self.actor_loss(batch)
        for parameter in self._of_critic.values():
            parameter.requires_grad_(True)
        self.descend(self.optimiser, loss, self.learnt, "policy")
        return {"actor_loss": float(loss.detach()), **info}

    # -- what a subclass says ---------------------------------------------------------------------------------------

    def target(self, batch: Transitions) -> Tensor:
        """What ``Q(o, a)`` [B] should be; no gradient passes."""
        raise NotImplementedError

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        """What the actor minimises, and metrics."""
        raise NotImplementedError

    def judged(self, batch: Transitions) -> Tensor:
        """The recorded decisions [B,A] as the critics see them."""
        return self.policy.judged(batch.stored, batch.sample, batch.executed)

    def regulariser(self, batch: Transitions, value: Tensor) -> Tensor:
        """What else the critics minimise, given their ``value`` [K,B] of the batch."""
        return value.new_zeros(())

    # -- parts ------------------------------------------------------------------------------------------------------

    def least(self, stored: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """The least value [B] of a random subset of the target heads."""
        chosen = torch.randperm(self.critic.heads, generator=self.generator)[: self.config.subset]
        lowest: Tensor = self.target_critic(stored, action)[chosen].amin(0)
        return lowest

    @torch.no_grad()
    def follow(self) -> None:
        """Move the targets a little towards the critics."""
        for slow, fast in zip(self.target_critic.parameters(), self.critic.parameters(), strict=True):
            slow.lerp_(fast, self.config.target_rate)

    def descend(
        self, optimiser: torch.optim.Optimizer, loss: Tensor, parameters: Mapping[str, nn.Parameter], who: str
    ) -> None:
        """One optimiser step on ``loss``."""
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), self.config.grad_norm))
        if not torch.isfinite(loss) or norm != norm or norm == float("inf"):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "loss")
            raise NonFiniteError(
                f"the {who} gradient of {bad!r} is not finite at step {self.steps}, so the step was not taken; go on "
                "from the last checkpoint with a lower learning rate."
            )
        optimiser.step()

    def seeing(self) -> list[Any]:
        """What standardises its inputs."""
        return [self.critic, self.target_critic, self.policy]

    def _calibrate(self) -> None:
        """Standardise what critics and policy see by what is in the memory."""
        stored = self.memory.sample(4096, self.generator).stored
        for part in self.seeing():
            calibrate = getattr(part, "calibrate", None)
            if callable(calibrate):
                calibrate(stored if part is not self.policy else public(dict(stored)), OneProcess())

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimisers, memory, generator and counters (see ``Resumable``)."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "critic_optimiser": self.critic_optimiser.state_dict(),
            "memory": self.memory.state_dict(),
            "generator": self.generator.get_state(),
            "counters": [self.decisions, self.steps, self.owed],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        for name in ("critic", "target_critic", "optimiser", "critic_optimiser", "memory"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.decisions, self.steps, self.owed = state["counters"]


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
