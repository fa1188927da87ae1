"""The base of PPO, GRPO and RLOO: epochs of minibatches, bounded by a KL stop and an adaptive learning rate.

The log-probability is that of a whole denoising chain (equal to that of the action or a surrogate for it, see
``policies/flow.py``), or of every action or token (see below).  The KL is the *exact* one of the whole chains or
chunks, without sampling noise.

Recorded log-probs against the learner's own: stale decisions are weighted, numerics corrected, errors refused.

A decision of the learner's own version has the density that it was sampled from, up to rounding.  Where the two differ
by more than ``max_logprob_gap``, all log-probs of that version are recomputed and the metrics say so; a difference
that rounding cannot explain is an error (:func:`check_density`).  A decision of an *older* version really has another
density, and gets the decoupled objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298):

    w min(rho A, clip(rho) A),   w = min(pi_prox / pi_behaviour, w_max),   rho = pi / pi_prox

``pi_behaviour`` is the recorded density and ``pi_prox`` that of the policy at the start of the update, computed once.
Deviation from AReaL: weights above ``w_max`` are truncated, not dropped.

The surrogate loss of a minibatch: every part of a likelihood has an importance ratio of its own.

A policy gives the log-prob of its chunk, [B], or those of G parts, [B,G], whose sum is that of the chunk: G = H for
actions, G = H*D for tokens (RLinf-VLA, arXiv 2510.06710; SimpleVLA-RL, arXiv 2509.09674).  Each part has the advantage
of its decision, and is clipped by itself:

    L = -mean_b sum_g m_bg w_bg l(rho_bg, A_b),    rho_bg = exp(log pi_bg - log pi_old,bg)

``m`` is 0 for the parts of actions that were not executed because the episode had ended inside the chunk.  They do not
influence the reward, so the gradient stays that of the return where parts are independent or each depends on earlier
ones only.  At ``rho = 1`` the gradient of a chunk that was executed whole is ``A grad log pi`` for every G, so clip
bounds change with G, but learning rate, gradient norm and entropy weight keep their meaning.

Deviation: both papers divide by the number of valid parts in a minibatch (token-mean), which is this loss times a
constant.  Dividing by each decision's own number would weight its parts by how early the episode ended.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import (
    B,
    Decisions,
    ages,
    clip_gradients,
    is_finite,
    mean,
    micro_batches,
    select,
    select_each,
)
from vla_rl.algorithms.learner import BaseLearner, set_lr
from vla_rl.contract.batch import OneProcess, Reducer, Rollout
from vla_rl.contract.config import Checked, above_zero, at_least, check_choice, check_ordered
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.load import installed
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, Observer, public, require
from vla_rl.contract.tracker import is_shard

T = TypeVar("T")
LR_FACTOR = 1.4  # by which the learning rate changes when the last epoch's KL misses the target


@dataclass(frozen=True)
class PolicyGradientConfig(Checked):
    """How far the policy moves per rollout; ``target_kl`` is the KL of the chain, summed over its Gaussian terms."""

    learner: ClassVar[type[PolicyGradient[Any]]]
    epochs: int = at_least(3, 1)
    minibatch: int = at_least(320, 1)  # decisions
    lr: float = above_zero(5e-5)
    target_kl: float = above_zero(0.04)
    stop_kl: float = above_zero(4.0)  # no further policy step in this update beyond stop_kl * target_kl
    lr_bounds: tuple[float, float] = (1e-6, 1e-3)
    entropy: float = 0.0  # weight of the chain's summed entropy (only for learned noise, such as Flow-Noise)
    grad_norm: float = above_zero(1.0)
    max_logprob_gap: float = at_least(1e-2, 0)  # beyond this, log-probs of the learner's version are recomputed
    max_importance_weight: float = above_zero(2.0)  # of decisions of an older policy version
    max_age: int = at_least(16, 0)  # decisions that are more updates old are dropped
    # Most decisions in one forward pass; it bounds memory alone.  0: the minibatch, or as many as a GPU's memory takes.
    micro_batch: int = at_least(0, 0)
    moments: Literal["float32", "8bit"] = "float32"  # Adam's; "8bit" takes a quarter of the memory (``adam_8bit.py``)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ordered(self, "lr_bounds")
        check_choice(self, "moments", "float32", "8bit")

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> PolicyGradient[Any]:
        return self.learner(policy, parameters, critic, self, generator, reducer)


def _adam(parameters: list[nn.Parameter], config: PolicyGradientConfig) -> torch.optim.Optimizer:
    """Raises UserError where 8-bit moments are not to be had."""
    if config.moments == "8bit":
        if any(map(is_shard, parameters)):
            raise UserError(
                'moments="8bit" cuts blocks where sharded cuts weights, so the run would not be resumed; leave one of '
                "them out."
            )
        library = installed("vla_rl.algorithms.adam_8bit", "Adam's moments cannot take a byte each", "low-memory")
        return cast(torch.optim.Optimizer, library.Adam8bit(parameters, lr=config.lr, eps=1e-5))
    # Few calls: one kernel on a GPU; elsewhere all parameters in each operation, which has the bits of one by one and,
    # unlike the one kernel, gives the same on every processor when a run is resumed.
    fused = all(parameter.is_cuda for parameter in parameters)
    foreach = not fused and not any(map(is_shard, parameters))  # which torch cannot mix with others there
    return torch.optim.Adam(parameters, lr=config.lr, eps=1e-5, fused=fused, foreach=foreach)


class PolicyGradient(BaseLearner, Generic[B]):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` in place and returns metrics.

    A subclass computes advantages (:meth:`_make_batch`) and the loss (:meth:`policy_loss`).
    Raises UserError when the policy has no likelihood and NonFiniteError when a loss or gradient is not finite; the
    weights are then those of the last finite step.
    """

    needs: ClassVar[tuple[str, ...]] = ("log_prob", "kl")  # methods of its policy, and what lacks without
    otherwise = (
        "so no ratio can be formed; put a Gaussian around its output (GaussianOutput, as openvla_oft.py:gaussian_ppo "
        "does) if it has an L1 head, correct it by a residual (residual_td3, residual_ppo), or add them."
    )
    counters: ClassVar[tuple[str, ...]] = ("iteration", "max_lr", "micro_batch")

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module | None,
        config: PolicyGradientConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        """``critic``: for a subclass whose advantages need one."""
        require(policy, type(self).__name__, self.needs, self.otherwise)
        self.policy, self.config = policy, config
        self.parameters, self.generator = dict(parameters), generator
        # The rest are statistics: published and saved like weights, but not optimized.
        self.learnt = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.reducer: Reducer = reducer or OneProcess()
        self._critic_parameters: dict[str, nn.Parameter] = {}
        self.optimizer = _adam(list(self.learnt.values()), config)
        self.iteration, self.micro_batch = 0, config.micro_batch
        self.max_lr = config.lr_bounds[1]
        self.calibration: dict[str, Tensor] = {}  # input statistics that were fitted to the first rollout
        self._warned = False

    @property
    def lr(self) -> float:
        """The optimizer's learning rate; the setter clamps it to ``lr_bounds`` and ``max_lr``."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        set_lr(self.optimizer, min(max(value, self.config.lr_bounds[0]), self.max_lr))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calibration": self.calibration}

    def best_state(self) -> dict[str, Any]:
        """A copy of all that :meth:`roll_back` restores."""
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return {"parameters": weights, "calibrated": bool(self.calibration)}

    @torch.no_grad()
    def roll_back(self, state: dict[str, Any], lr_factor: float) -> None:
        """Restore :meth:`best_state`, forget the optimizers' moments and bound the learning rate by a lower one.

        Weights that are older than the input normalization keep the present one, which is fitted only once.
        """
        self.restore(state["parameters"])
        for name, value in self.calibration.items() if not state["calibrated"] else ():
            self.parameters[name].copy_(value)
        self.max_lr = max(self.config.lr_bounds[0], self.lr * lr_factor)
        self.lr = self.max_lr
        self.forget_moments()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.calibration = {name: value.clone() for name, value in state["calibration"].items()}

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One iteration: advantages, then epochs over newly shuffled minibatches.

        Without a usable decision (all idle or intervened) nothing changes and ``decisions`` is 0.
        """
        batch, metrics = self._make_batch(rollout)
        metrics["rollout/decisions"] = self._sum(metrics["rollout/decisions"])
        if not metrics["rollout/decisions"]:
            return metrics
        old = self._fitting(lambda: self._old_likelihood(batch, metrics), len(batch.logprob))
        batch = self._with_proximal(batch, old, metrics)
        kl, stopped = 0.0, self._in_warmup()
        warmup = stopped
        losses: list[dict[str, float]] = []
        for epoch in range(self.config.epochs):
            batch = self._at_epoch(epoch, batch, rollout)
            epoch_kl: list[float] = []
            for index, share in self._minibatches(len(batch.logprob)):
                params = None if stopped else select_each(old.params, index)
                losses.append(self._train(select(batch, index), params, share))
                if not stopped:
                    epoch_kl.append(losses[-1]["policy/kl"])
                    stopped = epoch_kl[-1] > self.config.stop_kl * self.config.target_kl
            kl = sum(epoch_kl) / len(epoch_kl) if epoch_kl else kl
        if not warmup:
            self._adapt_lr(kl, stopped)
        self.iteration += 1
        for observer in self._observers():
            observer.observe(batch.features, self.reducer)
        state = {"policy/kl_last": kl, "policy/stopped": float(stopped), "policy/lr": self.lr}
        return {**metrics, **mean(losses), **state}

    # -- implemented by subclasses-----------------------------------------------------------------------------------

    def _make_batch(self, rollout: Rollout) -> tuple[B, dict[str, float]]:
        """The usable decisions with their advantages, and metrics; ``decisions`` is their number."""
        raise NotImplementedError

    def _at_epoch(self, epoch: int, batch: B, rollout: Rollout) -> B:
        """``batch``, made of ``rollout``, as it is learnt from in epoch number ``epoch``."""
        return batch

    def policy_loss(self, minibatch: B, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The loss, and the clipped share of each sample's parts [B]."""
        raise NotImplementedError

    def _in_warmup(self) -> bool:
        """Whether the policy stays unchanged in this iteration."""
        return False

    def _observers(self) -> list[Observer]:
        """The modules that keep running statistics of their inputs."""
        return [self.policy] if isinstance(self.policy, Observer) else []

    def critic_loss(self, minibatch: B) -> Tensor:
        """The critic's loss, for a subclass that has ``_critic_parameters``."""
        raise NotImplementedError

    # -- data -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _old_likelihood(self, batch: B, metrics: dict[str, float]) -> Likelihood:
        parts = []
        for index, _ in self._passes(len(batch.logprob)) or [(None, 1.0)]:
            part = batch if index is None else select(batch, index)
            parts.append(self.policy.log_prob(public(dict(part.features)), part.sample, part.aux))
        old = parts[0] if len(parts) == 1 else _joined(parts)
        metrics["policy/entropy"] = float(old.entropy.mean())
        if "std" in old.params:
            metrics["policy/noise_std"] = float(old.params["std"].mean())
        return old

    def _with_proximal(self, batch: B, old: Likelihood, metrics: dict[str, float]) -> B:
        """``batch`` with the log-probs and weights of the objective (see the module); says once what it replaced."""
        batch, found = use_proximal(batch, old, self.config, self.reducer)
        metrics |= found
        if found["policy/logprob_recomputed"] and not self._warned:
            self._warned = True
            warn_recomputed(found["policy/logprob_gap"])
        return batch

    def _usable(self, rollout: Rollout, metrics: dict[str, float]) -> tuple[Tensor, Tensor]:
        """The policy's own decisions bool [T,E] that are at most ``max_age`` updates old, and all ages int [T,E].

        Counts the older ones as ``rollout/dropped_stale``.
        """
        own = rollout.valid.any(-1) & ~rollout.intervened.any(-1)
        age = ages(rollout, self.policy.version)
        fresh = age <= self._max_age()
        metrics["rollout/dropped_stale"] = self._sum(float((own & ~fresh).sum()))
        return own & fresh, age

    def _max_age(self) -> int:
        """The age beyond which decisions are dropped."""
        return self.config.max_age

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

    def _train(self, minibatch: B, old: Mapping[str, Tensor] | None, share: float) -> dict[str, float]:
        """One step of policy and critic on the mean loss of a minibatch, of which this process has ``share``.

        ``old``: the distributions at the start of the update; ``None`` while the policy waits.
        """
        both = {"critic": self._critic_parameters, "policy": self.learnt if old is not None else {}}
        trained = {part: parameters for part, parameters in both.items() if parameters}
        if not trained:
            return {}

        def step() -> tuple[dict[str, float], list[Tensor]]:
            stats = [minibatch.logprob.new_zeros(4, dtype=torch.float64)]
            return self._step(self.optimizer, self._losses(minibatch, old, share, stats), trained)[0], stats

        norms, stats = self._fitting(step, len(minibatch.logprob))
        kl, clipped, policy, critic = map(float, self.reducer.sum(reduce(torch.add, stats).cpu()))
        found = {"critic/loss": critic} if "critic" in trained else {}
        if old is None:
            return found
        named = {"policy/kl": kl, "policy/clip_fraction": clipped, "policy/loss": policy}
        return {**found, **named, "policy/grad_norm": norms["policy"]}

    def _losses(
        self, minibatch: B, old: Mapping[str, Tensor] | None, share: float, stats: list[Tensor]
    ) -> Iterator[Tensor]:
        """The losses of the micro-batches.

        Appends the share of each in KL, clip fraction, policy's and critic's loss to ``stats``.
        """
        for index, part in self._passes(len(minibatch.logprob)):
            micro, weight = minibatch if index is None else select(minibatch, index), share * part
            micro = replace(micro, features=dict(micro.features))  # read once for policy and critic
            zero = minibatch.logprob.new_zeros(())
            kl, clipped, policy, critic = zero, zero, zero, zero
            if old is not None:
                params = old if index is None else select_each(old, index)
                kl, clipped, policy = self._policy_losses(micro, params, weight)
            if self._critic_parameters and len(micro.logprob):
                critic = weight * self.critic_loss(micro)
            stats.append(torch.stack([item.detach().double() for item in (kl, clipped, policy, critic)]))
            yield policy + critic

    def _policy_losses(self, micro: B, old: Mapping[str, Tensor], weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """KL, clip fraction and loss of a micro-batch with ``weight`` in its minibatch."""
        new = self.policy.log_prob(public(dict(micro.features)), micro.sample, micro.aux)
        if not len(micro.logprob):  # 0, but its backward pass takes part in those of the other processes
            nothing = new.logprob.sum()
            return nothing, nothing, nothing
        loss, clipped = self.policy_loss(micro, new)
        kl = self.policy.kl(old, new.params).mean()
        if self.config.entropy:  # else nothing of it is differentiated
            loss = loss - self.config.entropy * new.entropy.mean()
        return weight * kl, weight * clipped.mean(), weight * loss

    def _fitting(self, compute: Callable[[], T], size: int) -> T:
        """``compute()`` of ``size`` decisions, again with half the micro-batch where the memory of a GPU runs out.

        Only where the config names none, and not among several processes, which pass through their networks together.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError:
                now = min(self.micro_batch or size, size)
                if now < 2 or self.config.micro_batch or self.reducer.size > 1:
                    raise
            self.micro_batch = (now + 1) // 2  # after the handler, whose error holds what the failed pass had computed
            torch.cuda.empty_cache()

    def _passes(self, size: int) -> list[tuple[Tensor | None, float]]:
        """The micro-batches of ``size`` decisions, and as many without any as other processes need (``Reducer``)."""
        own = list(micro_batches(size, self.micro_batch))
        return own + [(torch.zeros(0, dtype=torch.int64), 0.0)] * (self.reducer.passes(len(own)) - len(own))

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        losses: Iterable[Tensor],
        trained: Mapping[str, Mapping[str, nn.Parameter]],
    ) -> tuple[dict[str, float], float]:
        """One optimizer step on the sum of ``losses`` over all processes; the norm of every part's gradient, the sum.

        ``losses`` is lazy: every loss is differentiated before the next one is computed, so memory holds one graph.
        The gradients of each part of ``trained`` {part: {name: parameter}} are clipped by themselves.
        """
        for group in optimizer.param_groups:  # zero_grad asks a profiler first, which takes longer
            for parameter in group["params"]:
                parameter.grad = None
        total: Tensor | float = 0.0
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
            total = total + loss.detach().double()
        self.reducer.sum_gradients([item for parameters in trained.values() for item in parameters.values()])
        norms = [clip_gradients(items.values(), self.config.grad_norm).double() for items in trained.values()]
        found = torch.stack([*norms, torch.as_tensor(total, dtype=torch.float64).to(norms[0].device)]).tolist()
        if not all(map(math.isfinite, found)):
            named = ((part, name, item.grad) for part, items in trained.items() for name, item in items.items())
            broken = ((part, name) for part, name, grad in named if grad is not None and not is_finite(grad))
            part, bad = next(broken, (next(iter(trained)), "loss"))
            raise NonFiniteError(
                f"the {part} gradient of {bad!r} is not finite in iteration {self.iteration}, so the step was not "
                "taken; resume from the last checkpoint with a lower learning rate."
            )
        optimizer.step()
        return dict(zip(trained, found, strict=False)), found[-1]

    def _adapt_lr(self, kl: float, stopped: bool) -> None:
        if stopped or kl > 1.5 * self.config.target_kl:
            self.lr /= LR_FACTOR
        elif kl < 0.67 * self.config.target_kl:
            self.lr *= LR_FACTOR


def clipped_objective(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(rho A, clip(rho, 1-low, 1+high) A)`` and where ``rho`` was clipped (arXiv 1707.06347, eq. 7).

    Everything has the shape of ``ratio``; ``advantage`` broadcasts with it.
    """
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantage, clipped * advantage), (ratio != clipped).float()


def _joined(parts: list[Likelihood]) -> Likelihood:
    """One likelihood of all decisions from those of micro-batches."""
    params = {name: torch.cat([part.params[name] for part in parts]) for name in parts[0].params}
    return Likelihood(torch.cat([p.logprob for p in parts]), torch.cat([p.entropy for p in parts]), params)


BF16_ERROR = 0.011  # std of a log-ratio per sqrt(term), bfloat16 acting against float32 learning
NOISY = 0.2  # std of a Gaussian term with a mean within [-1, 1] down to which that holds
SYSTEMATIC = 0.1  # nats of mean gap that rounding, which has no preferred sign, does not reach


def use_proximal(
    batch: B, old: Likelihood, limits: PolicyGradientConfig, reducer: Reducer
) -> tuple[B, dict[str, float]]:
    """``batch`` with the log-probs of the ratios' denominators and the weights of stale decisions, and metrics.

    ``old`` is the likelihood of ``batch`` under the policy at the start of the update.  Log-probs of parts are compared
    and weighted one by one, as AReaL does for tokens.

    Raises ContractError when acting and learning give different parts, or densities of one version that disagree.
    """
    _require_same_parts(batch.logprob, old.logprob)
    gap, is_stale = old.logprob - batch.logprob, batch.age > 0
    stale = for_parts(is_stale, gap)
    largest = max_abs(gap[~is_stale])
    recompute = float(reducer.sum(torch.tensor(float(largest > limits.max_logprob_gap), dtype=torch.float64))) > 0
    if recompute:
        check_density(joint(gap[~is_stale]), rounding_terms(old, batch.sample)[~is_stale], reducer)
    proximal = old.logprob if recompute else torch.where(stale, old.logprob, batch.logprob)
    importance = torch.where(stale, gap.exp().clamp(max=limits.max_importance_weight), 1.0)
    metrics = {
        "policy/logprob_gap": largest,
        "policy/logprob_recomputed": float(recompute),
        "policy/importance_weight": float(importance[is_stale].mean()) if is_stale.any() else 1.0,
        "rollout/stale": float(is_stale.double().sum()) / max(1, len(is_stale)),
        "rollout/age": float(batch.age.double().sum()) / max(1, len(is_stale)),
    }
    return replace(batch, logprob=proximal, weight=for_parts(batch.weight, gap) * importance), metrics


def check_density(gap: Tensor, terms: Tensor, reducer: Reducer) -> None:
    """Raise ContractError when rounding cannot explain ``gap`` [B] between two log-densities of one policy version.

    Rounding to bfloat16 gives a log-density an error of about ``0.011 sqrt(terms)``, with ``terms`` float [B] of
    :func:`rounding_terms`, without a preferred sign.  Beyond eight times that, or with a mean that is too large for the
    spread, ``log_prob`` is not the density that ``act`` samples from.
    """
    bound = 8.0 * BF16_ERROR * terms.double().sqrt()
    values = gap.double()
    parts = [values.sum(), values.square().sum(), torch.tensor(len(gap)), (values.abs() > bound).sum(), terms.sum()]
    total, squares, count, beyond, expected = reducer.sum(torch.stack([part.double().cpu() for part in parts])).tolist()
    mean = total / max(count, 1.0)
    variance = max(squares / max(count, 1.0) - mean**2, BF16_ERROR**2 * expected / max(count, 1.0))
    systematic = SYSTEMATIC + variance + 4.0 * math.sqrt(variance / max(count, 1.0))
    if not (beyond or abs(mean) > systematic):
        return
    raise ContractError(
        f"log_prob differs from the log-prob that act recorded with the same weights by {mean:.3g} on average, and by "
        f"more than 8 times what bfloat16 rounds in {int(beyond)} of {int(count)} decisions, which rounding cannot "
        "explain, so every ratio would be wrong; make the policy's log_prob the density that act samples from."
    )


def warn_recomputed(gap: float) -> None:
    """Say that recorded log-probs were replaced."""
    warnings.warn(
        f"recorded log-probs differ by up to {gap:.2g} from those of the learner's own numerics, so they are "
        "recomputed (metric policy/logprob_recomputed); act and learn in the same precision to avoid the difference.",
        stacklevel=3,
    )


def _require_same_parts(recorded: Tensor, present: Tensor) -> None:
    if recorded.shape != present.shape:
        raise ContractError(
            f"act recorded log-probs {list(recorded.shape)} but log_prob gives {list(present.shape)}, so no ratio can "
            "be formed; give both per chunk [B], or both for the same parts [B,G]."
        )


def max_abs(gap: Tensor) -> float:
    """The largest absolute value, 0 for an empty tensor."""
    return float(gap.abs().max()) if len(gap) else 0.0


def rounding_terms(likelihood: Likelihood, sample: Tensor) -> Tensor:
    """float64 [B]: how many terms with a std of ``NOISY`` round as much as the log-density of each decision.

    That is the number of its terms, but the rounding of a mean is divided by the std, so a term with less noise or with
    a larger mean counts as several.  Tokens count as one each.
    """
    if "std" not in likelihood.params or "mean" not in likelihood.params:
        return torch.ones_like(sample, dtype=torch.float64).flatten(1).sum(1)
    mean, std = (likelihood.params[name].detach().double() for name in ("mean", "std"))
    return (NOISY * mean.abs().clamp(min=1.0) / std).square().clamp(min=1.0).flatten(1).sum(1)


Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def surrogate(minibatch: Decisions, logprob: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """The loss, and the clipped share of every decision's parts [B].

    ``logprob`` [B] or [B,G] is that of the present policy.  ``objective`` gives from ratios [B,G] and advantages [B,1]
    the value to maximise and where it was clipped, both [B,G].

    Raises ContractError when the parts cannot be assigned to actions.
    """
    executed = executed_parts(minibatch.valid, minibatch.logprob)
    log_ratio = torch.where(executed, _columns(logprob) - _columns(minibatch.logprob), 0.0)
    value, clipped = objective(log_ratio.exp(), minibatch.advantage[:, None])
    value = torch.where(executed, _columns(minibatch.weight) * value, 0.0)
    return -value.sum(1).mean(), torch.where(executed, clipped, 0.0).sum(1) / executed.sum(1)


def executed_parts(valid: Tensor, logprob: Tensor) -> Tensor:
    """bool [B,G]: which parts of ``logprob`` [B] (then G = 1) or [B,G] belong to executed actions, ``valid`` [B,H].

    Raises ContractError unless every action has equally many parts.
    """
    if logprob.ndim == 1:
        return torch.ones_like(logprob, dtype=torch.bool)[:, None]
    parts, horizon = logprob.shape[1], valid.shape[1]
    if parts % horizon:
        raise ContractError(
            f"a likelihood has {parts} parts but a chunk {horizon} actions, so it is unknown which parts belong to "
            "actions that were not executed; give one number for the chunk, or equally many for every action."
        )
    return valid.repeat_interleave(parts // horizon, 1)


def joint(logprob: Tensor) -> Tensor:
    """The log-prob [B] of the chunk from ``logprob`` [B] or from its parts [B,G]."""
    return logprob if logprob.ndim == 1 else logprob.sum(1)


def for_parts(values: Tensor, logprob: Tensor) -> Tensor:
    """``values`` [B] in a shape that broadcasts with ``logprob`` [B] or [B,G]."""
    return values if logprob.ndim == 1 else values[:, None]


def _columns(values: Tensor) -> Tensor:
    """``values`` [B] as [B,1]; [B,G] as it is."""
    return values[:, None] if values.ndim == 1 else values
