"""The base of PPO, GRPO and RLOO: epochs of minibatches, bounded by a KL stop and an adaptive learning rate.

The log-probability is that of a whole denoising chain (equal to that of the action or a surrogate for it, see
``policies/flow.py``).  The KL is the *exact* Gaussian KL of the chains, without sampling noise.  Recorded log-probs
that differ from the learner's own by more than a bound are recomputed before the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import OneProcess, Reducer, Rollout
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, Observer, public


@dataclass(frozen=True)
class PolicyGradientConfig:
    """How far the policy moves per rollout; ``target_kl`` is the KL of the chain, summed over its Gaussian terms."""

    epochs: int = 3
    minibatch: int = 320  # decisions
    lr: float = 5e-5
    target_kl: float = 0.04
    stop_kl: float = 4.0  # no further policy step in this update beyond stop_kl * target_kl
    lr_factor: float = 1.4  # changes the learning rate when the last epoch's KL misses the target
    lr_bounds: tuple[float, float] = (1e-6, 1e-3)
    entropy: float = 0.0  # weight of the chain's summed entropy (only for learned noise, such as Flow-Noise)
    grad_norm: float = 1.0
    max_logprob_gap: float = 1e-2  # beyond this, old log-probs are recomputed in training precision


@dataclass(frozen=True)
class Decisions:
    """The usable decisions of a rollout, flattened to [B]: neither idle nor intervened."""

    features: dict[str, Tensor]
    sample: Tensor
    aux: Mapping[str, Tensor]
    logprob: Tensor
    advantage: Tensor


B = TypeVar("B", bound=Decisions)


class PolicyGradient(Generic[B]):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` in place and returns metrics.

    A subclass computes advantages (:meth:`_make_batch`) and the loss (:meth:`policy_loss`).
    Raises UserError when the policy has no likelihood and NonFiniteError when a loss or gradient is not finite; the
    weights are then those of the last finite step.
    """

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        config: PolicyGradientConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        if not isinstance(policy, LikelihoodPolicy):
            raise UserError(
                f"{type(self).__name__} needs a policy with log_prob and kl (LikelihoodPolicy) but "
                f"{type(policy).__name__} lacks them, so no ratio can be formed; add them or choose an algorithm for "
                "black-box policies."
            )
        self.policy, self.config = policy, config
        self.parameters, self.generator = dict(parameters), generator
        # The rest are statistics: published and saved like weights, but not optimized.
        self.learnt = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.reducer: Reducer = reducer or OneProcess()
        self.optimizer = torch.optim.Adam(self.learnt.values(), lr=config.lr, eps=1e-5)
        self.iteration = 0

    @property
    def lr(self) -> float:
        """The optimizer's learning rate; the setter clamps it to ``lr_bounds``."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        low, high = self.config.lr_bounds
        self.optimizer.param_groups[0]["lr"] = min(max(value, low), high)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, generator and iteration (see ``Resumable``)."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "iteration": self.iteration,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.iteration = state["iteration"]

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One iteration: advantages, then epochs over newly shuffled minibatches.

        Without a usable decision (all idle or intervened) nothing changes and ``decisions`` is 0.
        """
        batch, metrics = self._make_batch(rollout)
        metrics["rollout/decisions"] = self._sum(metrics["rollout/decisions"])
        if not metrics["rollout/decisions"]:
            return metrics
        old = self._old_likelihood(batch, metrics)
        batch = self._with_old_log_probs(batch, old, metrics)
        kl, stopped = 0.0, self._in_warmup()
        warmup = stopped
        losses: list[dict[str, float]] = []
        for _ in range(self.config.epochs):
            epoch_kl: list[float] = []
            for index, share in self._minibatches(len(batch.logprob)):
                minibatch = select(batch, index)
                losses.append(self._critic_step(minibatch, share))
                if not stopped:
                    info = self._policy_step(minibatch, select_each(old.params, index), share)
                    epoch_kl.append(info["policy/kl"])
                    losses.append(info)
                    stopped = info["policy/kl"] > self.config.stop_kl * self.config.target_kl
            kl = sum(epoch_kl) / len(epoch_kl) if epoch_kl else kl
        if not warmup:
            self._adapt_lr(kl, stopped)
        self.iteration += 1
        for observer in self._observers():
            observer.observe(batch.features, self.reducer)
        state = {"policy/kl_last": kl, "policy/stopped": float(stopped), "policy/lr": self.lr}
        return {**metrics, **_mean(losses), **state}

    # -- implemented by subclasses-----------------------------------------------------------------------------------

    def _make_batch(self, rollout: Rollout) -> tuple[B, dict[str, float]]:
        """The usable decisions with their advantages, and metrics; ``decisions`` is their number."""
        raise NotImplementedError

    def policy_loss(self, minibatch: B, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The loss, and the clipped share of each sample [B]."""
        raise NotImplementedError

    def _in_warmup(self) -> bool:
        """Whether the policy stays unchanged in this iteration."""
        return False

    def _observers(self) -> list[Observer]:
        """The modules that keep running statistics of their inputs."""
        return [self.policy] if isinstance(self.policy, Observer) else []

    def _critic_step(self, minibatch: B, share: float) -> dict[str, float]:
        """One critic step on a minibatch, before the policy's; nothing without a critic."""
        return {}

    # -- data -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _old_likelihood(self, batch: B, metrics: dict[str, float]) -> Likelihood:
        old = self.policy.log_prob(public(batch.features), batch.sample, batch.aux)
        metrics["policy/entropy"] = float(old.entropy.mean())
        if "std" in old.params:
            metrics["policy/noise_std"] = float(old.params["std"].mean())
        return old

    def _with_old_log_probs(self, batch: B, old: Likelihood, metrics: dict[str, float]) -> B:
        """``batch`` with the log-probs of the ratios' denominators: the recorded ones unless they are off."""
        metrics["policy/logprob_gap"] = max_abs(old.logprob - batch.logprob)
        return replace(batch, logprob=old.logprob) if self._log_probs_disagree(metrics["policy/logprob_gap"]) else batch

    def _log_probs_disagree(self, gap: float) -> bool:
        """Whether recorded log-probs are off by more than ``max_logprob_gap`` in any process."""
        return self._sum(float(gap > self.config.max_logprob_gap)) > 0

    def _minibatches(self, size: int) -> Iterator[tuple[Tensor, float]]:
        """A new permutation of all processes' decisions, cut into minibatches of nearly equal size.

        Yields for each minibatch the indices of this process's ``size`` decisions in it, and their share of it.
        """
        total, first = self._span(size)
        order = torch.randperm(total, generator=self.generator)
        for part in order.tensor_split(max(1, round(total / self.config.minibatch))):
            local = part[(part >= first) & (part < first + size)] - first
            yield local, len(local) / len(part)

    def _span(self, size: int) -> tuple[int, int]:
        """The number of decisions of all processes, and the index of this process's first one among them."""
        sizes = torch.zeros(self.reducer.size, dtype=torch.float64)
        sizes[self.reducer.rank] = size
        sizes = self.reducer.sum(sizes)
        return int(sizes.sum()), int(sizes[: self.reducer.rank].sum())

    def _sum(self, value: float) -> float:
        return float(self.reducer.sum(torch.tensor(value, dtype=torch.float64)))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _policy_step(self, minibatch: B, old: Mapping[str, Tensor], share: float) -> dict[str, float]:
        """One step on the mean loss of a minibatch, of which this process has the ``share`` in ``minibatch``."""
        loss, stats = torch.zeros(()), torch.zeros(3, dtype=torch.float64)
        if share:
            new = self.policy.log_prob(public(minibatch.features), minibatch.sample, minibatch.aux)
            kl = self.policy.kl(old, new.params).mean()
            loss, clipped = self.policy_loss(minibatch, new)
            loss = share * (loss - self.config.entropy * new.entropy.mean())
            stats = torch.stack([share * kl.detach(), share * clipped.mean(), loss.detach()]).double().cpu()
        norm = self._step(self.optimizer, loss, self.learnt, "policy")
        named = zip(("policy/kl", "policy/clip_fraction", "policy/loss"), self.reducer.sum(stats).tolist(), strict=True)
        return {**dict(named), "policy/grad_norm": norm}

    def _step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Mapping[str, nn.Parameter], name: str
    ) -> float:
        """One optimizer step on the sum of all processes' ``loss``; returns the gradient's norm."""
        optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()
        self.reducer.sum_gradients(parameters.values())
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), self.config.grad_norm))
        if not torch.isfinite(loss) or norm != norm or norm == float("inf"):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "loss")
            raise NonFiniteError(
                f"the {name} gradient of {bad!r} is not finite in iteration {self.iteration}, so the step was not "
                "taken; resume from the last checkpoint with a lower learning rate."
            )
        optimizer.step()
        return norm

    def _adapt_lr(self, kl: float, stopped: bool) -> None:
        if stopped or kl > 1.5 * self.config.target_kl:
            self.lr /= self.config.lr_factor
        elif kl < 0.67 * self.config.target_kl:
            self.lr *= self.config.lr_factor


def flatten(item: Tensor, mask: Tensor) -> Tensor:
    """The entries of ``item`` [T,E,...] where ``mask`` [T,E], as [B,...], one environment after the other.

    In this order, several processes have the same batch as one process with all environments.
    """
    return item.transpose(0, 1)[mask.T]


def max_abs(gap: Tensor) -> float:
    """The largest absolute value, 0 for an empty tensor."""
    return float(gap.abs().max()) if len(gap) else 0.0


def clipped_objective(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(rho A, clip(rho, 1-low, 1+high) A)`` and where ``rho`` was clipped, all [B] (arXiv 1707.06347, eq. 7)."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantage, clipped * advantage), (ratio != clipped).float()


def select(batch: B, index: Tensor) -> B:
    """The decisions at ``index``, in its order."""
    parts: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    parts = {
        name: select_each(item, index) if isinstance(item, Mapping) else item[index] for name, item in parts.items()
    }
    return replace(batch, **parts)


def select_each(items: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Every tensor at ``index``."""
    return {name: item[index] for name, item in items.items()}


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    names = {name for item in metrics for name in item}
    values = {name: [item[name] for item in metrics if name in item] for name in sorted(names)}
    return {name: sum(items) / len(items) for name, items in values.items()}
