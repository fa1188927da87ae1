"""The base of TD3, SAC and their descendants: a replay buffer, an ensemble of critics with targets, and a schedule.

Every critic has its own regression loss (a mean over critics inside the square would leave their differences
undetermined).  Targets are the minimum over a random subset of the target critics, drawn without replacement (Chen et
al. 2021, REDQ, arXiv 2101.05982).

Processes that share a run share its replay: each keeps what its own environments did, draws its share of every batch
from that, and all take the step of the mean gradient.  Its expectation is that of one replay where each has as many
decisions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import mean, mean_gradients
from vla_rl.algorithms.guard import FallbackConfig, Guard, ReleaseConfig
from vla_rl.algorithms.learner import BaseLearner
from vla_rl.contract.batch import OneProcess, Reducer, ReplayBuffer, Rollout, Transitions
from vla_rl.contract.config import Checked, above_zero, at_least, check_limits, check_ordered
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import ReparametrisedPolicy, public, require, set_released
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig


@dataclass(frozen=True)
class OffPolicyConfig(Checked):
    """The schedule of gradient steps, and the critics."""

    learner: ClassVar[type[OffPolicy]]
    batch: int = at_least(256, 1)
    utd_ratio: float = above_zero(0.25)  # gradient steps of the critics per collected decision
    learning_starts: int = at_least(1000, 0)  # collected decisions before the first gradient step
    critic_warmup: int = at_least(500, 0)  # first gradient steps, which train the critics only
    burst: int = at_least(0, 0)  # extra gradient steps when learning starts, for what the base has collected
    policy_delay: int = at_least(2, 1)  # gradient steps of the critics per step of the actor
    num_critics: int = at_least(10, 1)
    num_min_q: int = 2  # target critics in the minimum
    critic: HeadConfig = field(default_factory=HeadConfig)
    lr: float = above_zero(3e-4)  # of the actor
    critic_lr: float = above_zero(3e-4)
    tau: float = above_zero(0.005, 1)  # rate of the soft update of the targets
    grad_norm: float = above_zero(10.0)
    value_bounds: tuple[float, float] | None = None  # known bounds of the returns, to which targets are clamped
    offline_steps: int = at_least(0, 0)  # gradient steps from recorded data alone, before the first decision
    release: ReleaseConfig | None = None  # move the actor only while the critics foresee outcomes
    fallback: FallbackConfig | None = None  # return to the base when exploring succeeds less often than it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, num_min_q=(1, self.num_critics))
        check_ordered(self, "value_bounds")

    def build(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> OffPolicy:
        return self.learner(policy, parameters, critic, replay, self, generator, reducer)


class OffPolicy(BaseLearner):
    """A ``Learner``: ``update(rollout)`` adds to the replay buffer, then improves critics and policy from it.

    A subclass implements the critics' regression target (:meth:`target`) and the actor's loss (:meth:`actor_loss`).
    Raises UserError when the policy's decisions are not differentiable and NonFiniteError when a loss or gradient is
    not finite; the weights are then those of the last finite step.
    """

    needs: ClassVar[tuple[str, ...]] = ("rsample", "critic_action")  # methods of its policy, and what lacks without
    otherwise = "so no gradient could reach it; add them or choose an algorithm that needs likelihoods only."
    resumed = (*BaseLearner.resumed, "critic", "target_critic", "critic_optimizer", "replay", "guard")
    rolled_back: ClassVar[tuple[str, ...]] = ("critic", "target_critic")  # with the policy

    def __init__(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        config: OffPolicyConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        """Raises UserError for a config that the processes of ``reducer`` cannot share, too."""
        self.require_policy(policy)
        if not 1 <= config.num_min_q <= critic.num_critics:
            raise UserError(
                f"num_min_q {config.num_min_q} exceeds the {critic.num_critics} critics or is below 1, so no target "
                f"can be formed; choose 1 to {critic.num_critics}."
            )
        _require_shared(config, reducer.size if reducer else 1)
        self.policy, self.critic, self.replay, self.config = policy, critic, replay, config
        self.reducer: Reducer = reducer or OneProcess()
        self.parameters, self.generator = dict(parameters), generator
        # The rest are statistics: published and saved like weights, but not optimized.
        self.learnt = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._critic_parameters = {name: item for name, item in critic.named_parameters() if item.requires_grad}
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.learnt.values(), lr=config.lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self._critic_parameters.values(), lr=config.critic_lr, fused=True)
        self.decisions, self.steps, self.update_debt = 0, 0, 0.0
        self.guard = Guard(config.release, config.fallback)
        self.prepare()

    def require_policy(self, policy: object) -> None:
        """Raise UserError for a policy that cannot be trained: the first step of ``__init__``."""
        require(policy, type(self).__name__, self.needs, self.otherwise)

    def prepare(self) -> None:
        """Make what a subclass has besides: the last step of ``__init__``."""

    # -- learning ---------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add ``rollout`` to the replay buffer and take the gradient steps due for its decisions."""
        watched = self._watch(rollout)  # before anything is learnt from it
        self.replay.add(rollout)
        new, size, empty = self._of_all(int(rollout.valid.any(-1).sum()), len(self.replay), not len(self.replay))
        before, self.decisions = self.decisions, self.decisions + new
        if self.decisions >= self.config.learning_starts:
            self.update_debt += self.config.utd_ratio * (self.decisions - max(before, self.config.learning_starts - 1))
            if before < max(1, self.config.learning_starts):
                self.update_debt += self.config.burst
        metrics = {"rollout/decisions": float(new), "replay/size": float(size), **watched}
        if empty:
            # Steps that nothing can be sampled for are not made up for all at once.
            self.update_debt = min(self.update_debt, self.config.utd_ratio * new)
            return metrics
        infos = []
        while self.update_debt >= 1:
            self.update_debt -= 1
            infos.append(self.step())
        return {**metrics, "critic/steps": float(self.steps), **mean(infos)}

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Take ``steps`` gradient steps from the replay buffer as it is; ``report(step, metrics)`` after each."""
        for step in range(steps):
            report(step, self.step())

    def step(self) -> dict[str, float]:
        """One gradient step of the critics and, every ``policy_delay`` steps, one of the actor."""
        batch = self.replay.sample(self.config.batch // self.reducer.size, self.generator)
        if self.steps == 0:
            self._calibrate()
        info = self.critic_step(batch)
        turn = (self.steps + 1) % self.config.policy_delay == 0  # after the last of policy_delay critic steps
        if turn and self.steps >= self.config.critic_warmup and self.guard.free:
            info |= self.actor_step(batch)
            self.guard.moves()
        self.soft_update()
        self.steps += 1
        return info

    def critic_step(self, batch: Transitions) -> dict[str, float]:
        """One regression step of every critic on the same targets."""
        target = self.target(batch)
        if self.config.value_bounds:
            target = target.clamp(*self.config.value_bounds)
        value = self.critic(batch.features, self.critic_action(batch))
        errors = (value - target).square()
        loss = errors.mean(1).sum() + self.regularizer(batch, value)
        self.optimizer_step(self.critic_optimizer, loss, self._critic_parameters, "critic")
        if hasattr(self.replay, "read_losses"):
            self.replay.read_losses(errors.detach().mean(0))
        spread = value.detach().std(0).mean() if len(value) > 1 else torch.zeros(())
        return {
            "critic/loss": float(loss.detach()),
            "critic/value": float(value.detach().mean()),
            "critic/q_std": float(spread),
        }

    def actor_step(self, batch: Transitions) -> dict[str, float]:
        """One step on :meth:`actor_loss`; the critics stay as they are."""
        for parameter in self._critic_parameters.values():
            parameter.requires_grad_(False)
        loss, info = self.actor_loss(batch)
        for parameter in self._critic_parameters.values():
            parameter.requires_grad_(True)
        self.optimizer_step(self.optimizer, loss, self.learnt, "policy")
        return {"policy/loss": float(loss.detach()), **info}

    # -- remedies ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _watch(self, rollout: Rollout) -> dict[str, float]:
        """Let the guard look at ``rollout``, and return to the weights that it asks for; metrics, if there are any."""
        returned = self.guard.add(rollout, self._scores(rollout), self.learnt)
        if returned is not None:
            self._return(returned)
        set_released(self.policy, self.guard.released)
        return self.guard.metrics()

    def _scores(self, rollout: Rollout) -> Tensor:
        """What the critics expect of every decision [T,E]; zeros where nobody asks."""
        if not self.guard.release:
            return torch.zeros(rollout.valid.shape[:2])
        features = {name: item[:-1].flatten(0, 1) for name, item in rollout.features.items()}
        action = self.policy.critic_action(features, rollout.sample.flatten(0, 1), rollout.executed.flatten(0, 1))
        value: Tensor = self.critic(features, action).mean(0)
        return value.view(rollout.valid.shape[:2])

    def _return(self, weights: Mapping[str, Tensor]) -> None:
        """Give the actor earlier ``weights``, and forget the moments that led away from them."""
        for name, parameter in self.learnt.items():
            parameter.copy_(weights[name])
        self.optimizer.state.clear()

    # -- implemented by subclasses-----------------------------------------------------------------------------------

    def target(self, batch: Transitions) -> Tensor:
        """The regression target [B] of ``Q(o, a)``, without gradient."""
        raise NotImplementedError

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        raise NotImplementedError

    def critic_action(self, batch: Transitions) -> Tensor:
        """The recorded decisions [B,A] in the critics' action space."""
        return self.policy.critic_action(batch.features, batch.sample, batch.executed)

    def regularizer(self, batch: Transitions, value: Tensor) -> Tensor:
        """A term added to the critics' loss, given their ``value`` [K,B] of the batch."""
        return value.new_zeros(())

    # -- parts ------------------------------------------------------------------------------------------------------

    def min_target_q(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """The minimum [B] over a random subset of the target critics."""
        chosen = torch.randperm(self.critic.num_critics, generator=self.generator)[: self.config.num_min_q]
        return self.target_critic(features, action)[chosen].amin(0)

    @torch.no_grad()
    def soft_update(self) -> None:
        """Move the targets towards the critics by ``tau``."""
        for target, online in zip(self.target_critic.parameters(), self.critic.parameters(), strict=True):
            target.lerp_(online, self.config.tau)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Mapping[str, nn.Parameter], name: str
    ) -> None:
        """One optimizer step on ``loss`` with a bounded gradient norm."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        mean_gradients(self.reducer, parameters.values())
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), self.config.grad_norm))
        if not torch.isfinite(loss) or norm != norm or norm == float("inf"):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "loss")
            raise NonFiniteError(
                f"the {name} gradient of {bad!r} is not finite at step {self.steps}, so the step was not taken; resume "
                "from the last checkpoint with a lower learning rate."
            )
        optimizer.step()

    def input_normalizers(self) -> list[Any]:
        return [self.critic, self.target_critic, self.policy]

    def _of_all(self, *counts: int) -> list[int]:
        """Sums of ``counts`` over all processes."""
        total: Tensor = self.reducer.sum(torch.tensor(counts, dtype=torch.float64))
        return [int(count) for count in total.tolist()]

    def _calibrate(self) -> None:
        """Fit the input normalization of critics and policy to the replay buffer."""
        features = self.replay.sample(4096, self.generator).features
        for module in self.input_normalizers():
            calibrate = getattr(module, "calibrate", None)
            if callable(calibrate):
                calibrate(features if module is not self.policy else public(dict(features)), self.reducer)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counters": [self.decisions, self.steps, self.update_debt]}

    def best_state(self) -> dict[str, Any]:
        """A copy of all that :meth:`roll_back` restores: the policy, the critics and their targets."""
        state: dict[str, Any] = {"calibrated": self.steps > 0}
        state["parameters"] = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for key in self.rolled_back:
            state[key] = {name: value.clone() for name, value in getattr(self, key).state_dict().items()}
        return state

    def roll_back(self, state: dict[str, Any], lr_factor: float) -> None:
        """Restore :meth:`best_state`, forget the optimizers' moments and lower the actor's learning rate.

        Weights that are older than the input normalization get one that is fitted to the replay buffer again.
        """
        self.restore(state["parameters"])
        for key in self.rolled_back:
            getattr(self, key).load_state_dict(state[key])
        self.lr *= lr_factor
        self.forget_moments()
        if self.steps and not state["calibrated"]:
            self._calibrate()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.decisions, self.steps, self.update_debt = state["counters"]


def _require_shared(config: OffPolicyConfig, processes: int) -> None:
    """Raise UserError unless so many processes can share the replay and the decisions of ``config``."""
    if config.batch % processes:
        raise UserError(
            f"a batch of {config.batch} cannot be drawn equally from the replays of {processes} processes, so their "
            "decisions would not count alike; choose a multiple of the processes."
        )
    if processes > 1 and (config.release or config.fallback):
        raise UserError(
            f"release and fallback watch the episodes of one process, so {processes} would move their actors at "
            "different times; leave both out, or start one process."
        )


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the data of ``parameters`` by ``values`` within the block; for computations without gradient."""
    original = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = original[name]
