"""Advantages relative to a group, without a critic: ``n`` episodes from one start, each judged by the others.

A group is what was reset with one seed: the same task, scene and start.  ``R_i`` is the undiscounted sum of an
episode's rewards (if it was cut off, with what the source says it would still have earned: it is never left out), ``m``
the mean of its group's, and every decision of the episode has its advantage ``A_i``:

    LeaveOneOut    A_i = R_i - mean of the others' R = n/(n-1) (R_i - m)    E[ grad ] = grad J
    Mean           A_i = R_i - m                                           (1 - 1/n) grad J: the same direction
    Standardised   A_i = (R_i - m) / (std + 1e-6)                          re-weights tasks, see there

A group whose returns are all equal has advantages of exactly 0.  It leaves the gradient unbiased as long as it stays in
the denominators, which it does here; only its forward passes are saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vla_rl.algorithms.policy_gradient import Decisions, PolicyGradient, PolicyGradientConfig, by_row, largest
from vla_rl.contract.batch import TRUNCATION_RETURN, Reducer, Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood

# -- what an episode is worth ------------------------------------------------------------------------------------------


class Baseline(Protocol):
    """Turns the returns of one group into advantages, both float64 [n]; they are not all equal."""

    def advantages(self, returns: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LeaveOneOut:
    """Against the mean of the *others*, which an episode's own luck does not move: unbiased (Kool et al. 2019)."""

    def advantages(self, returns: Tensor) -> Tensor:
        """``R_i - (sum R - R_i) / (n - 1)``."""
        return returns - (returns.sum() - returns) / (len(returns) - 1)


@dataclass(frozen=True)
class Mean:
    """Against the mean of all, as GRPO without its std (Dr. GRPO, arXiv 2503.20783): shorter by ``1 - 1/n``."""

    def advantages(self, returns: Tensor) -> Tensor:
        """``R_i - m``."""
        return returns - returns.mean()


@dataclass(frozen=True)
class Standardised:
    """GRPO as published (Shao et al. 2024, arXiv 2402.03300): the group's own std (of ``n - 1``) sets the scale.

    Biased: a task that succeeds with probability p gets weight 2.41 (p = .02), 2.18 (.1), 1.74 (.5) at n = 8, and
    ``1 / sqrt(p (1-p))`` for large n, so it ascends the sum of ``2 arcsin sqrt p`` instead of that of p.
    """

    def advantages(self, returns: Tensor) -> Tensor:
        """``(R_i - m) / (std + 1e-6)``."""
        return (returns - returns.mean()) / (returns.std(correction=1) + 1e-6)


def relative(returns: Tensor, seeds: Tensor, baseline: Baseline) -> Tensor:
    """Advantages float64 [C] of episodes with ``returns`` [C]; equal ``seeds`` int [C] are one group.

    Raises ContractError for a group of one, which has nothing to be compared with.
    """
    advantage = torch.zeros_like(returns, dtype=torch.float64)
    for seed in seeds.unique():
        members = seeds == seed
        group = returns[members].double()
        if len(group) < 2:
            raise ContractError(
                f"the group of seed {int(seed)} has one episode, so it cannot be compared; give every group two or "
                "more (GroupConfig.size)."
            )
        if (group != group[0]).any():
            advantage[members] = baseline.advantages(group)
    return advantage


# -- how decisions are averaged ----------------------------------------------------------------------------------------


class Averaging(Protocol):
    """How the loss of decisions is averaged: ``L = sum_i w_i sum_t l_it``."""

    def weights(self, units: Tensor, reducer: Reducer) -> Tensor:
        """``w`` float64 [C] of episodes with so many learnt decisions, int [C]; ``reducer`` sums over processes."""


@dataclass(frozen=True)
class Global:
    """One over the number of all decisions: each has the same weight, so the direction is that of the gradient."""

    def weights(self, units: Tensor, reducer: Reducer) -> Tensor:
        """``1 / N``."""
        total = reducer.sum(units.sum().double()).clamp(min=1.0)
        return torch.ones_like(units, dtype=torch.float64) / total


@dataclass(frozen=True)
class Constant:
    """One over episodes times ``longest``, the most decisions an episode can have (Dr. GRPO): never varies."""

    longest: int

    def weights(self, units: Tensor, reducer: Reducer) -> Tensor:
        """``1 / (C longest)``."""
        return torch.ones_like(units, dtype=torch.float64) / (_episodes(units, reducer) * self.longest)


@dataclass(frozen=True)
class PerTrajectory:
    """One over episodes times the episode's own length (WoVR, arXiv 2602.13977; also the published GRPO).

    **Not a policy gradient of success**: lengths that depend on the outcome can turn its sign.  An action with 50 %
    success (1 decision to succeed, 4 to fail) is preferred to one with 55 % (3 and 4).  It is here for comparisons.
    """

    def weights(self, units: Tensor, reducer: Reducer) -> Tensor:
        """``1 / (C T_i)``."""
        return 1.0 / (_episodes(units, reducer) * units.double().clamp(min=1.0))


def _episodes(units: Tensor, reducer: Reducer) -> Tensor:
    total: Tensor = reducer.sum(torch.tensor(float(len(units)), dtype=torch.float64, device=units.device))
    return total


# -- the learner -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupRelativeConfig(PolicyGradientConfig):
    """What GRPO and RLOO have in common."""

    averaging: Averaging = Global()
    most_correction: float = 2.0  # bound of the importance weight of decisions that an older policy made


@dataclass(frozen=True)
class _Batch(Decisions):
    """``weight`` [B]: the loss is the mean of ``weight * l``; ``stale`` bool [B]: made by an older policy."""

    weight: Tensor
    stale: Tensor


class GroupRelative(PolicyGradient[_Batch]):
    """A ``Learner`` from whole episodes in groups, one per column (``experience/groups.py`` collects them).

    Only what the policy did itself until an episode's first success, that decision included, is learnt from: neither
    idle nor intervened decisions, nor those after it.  Decisions of a version older than the rollout's newest are
    anchored at the present policy and weighted by how much likelier it makes them, at most ``most_correction``
    (decoupled PPO, Hilton et al., arXiv 2110.00641), so that the clip holds the step and not the age.  Among the
    metrics is ``truncated``, the share of episodes that were cut off.
    """

    config: GroupRelativeConfig
    baseline: Baseline

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """What is maximised, and where it was clipped, all [B]."""
        raise NotImplementedError

    def policy_loss(self, row: _Batch, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The weighted objective, negative, and which samples were clipped."""
        objective, clipped = self.objective((new.logprob - row.logprob).exp(), row.advantage)
        return -(row.weight * objective).mean(), clipped

    @torch.no_grad()
    def _make_batch(self, rollout: Rollout) -> tuple[_Batch, dict[str, float]]:
        require_whole_episodes(rollout)
        earned = torch.where(rollout.valid, rollout.reward.double(), 0.0).sum((0, 2))
        advantage = relative(earned + beyond(rollout), rollout.seeds[0], self.baseline)
        learnt = _learnt(rollout)
        weight = self.config.averaging.weights(learnt.sum(0), self.reducer)
        used = learnt & (advantage != 0)
        weight = weight * self._sum(float(used.sum()))
        batch = _Batch(
            {name: by_row(item[:-1], used) for name, item in rollout.features.items()},
            by_row(rollout.sample, used),
            {name: by_row(item, used) for name, item in rollout.aux.items()},
            by_row(rollout.logprob, used),
            by_row(advantage.expand_as(used), used).to(rollout.logprob.dtype),
            by_row(weight.expand_as(used), used).to(rollout.logprob.dtype),
            by_row(rollout.version, used) < rollout.version.max(),
        )
        telling = {"return": float(earned.mean()), "truncated": float(rollout.truncated.any(0).double().mean())}
        telling["stale"] = float(batch.stale.double().mean()) if used.any() else 0.0
        return batch, {"decisions": float(used.sum()), **telling}

    def _with_old_log_probs(self, batch: _Batch, old: Likelihood, metrics: dict[str, float]) -> _Batch:
        gap, fresh = old.logprob - batch.logprob, ~batch.stale
        metrics["parity"] = largest(gap[fresh])
        off = self._log_probs_disagree(metrics["parity"])
        anchor = old.logprob if off else torch.where(batch.stale, old.logprob, batch.logprob)
        correction = torch.where(batch.stale, gap.exp().clamp(max=self.config.most_correction), 1.0)
        return replace(batch, logprob=anchor, weight=batch.weight * correction)


def _learnt(rollout: Rollout) -> Tensor:
    """bool [T,C]: the policy's own decisions up to the first success of their episode, that one included."""
    success = rollout.success.long()
    after = success.cumsum(0) - success > 0
    return rollout.valid.any(-1) & ~rollout.intervened.any(-1) & ~after


def beyond(rollout: Rollout) -> Tensor:
    """float64 [C]: what each episode would still have earned; 0 unless it was truncated and its source knows."""
    found = torch.zeros(rollout.valid.shape[1], dtype=torch.float64, device=rollout.valid.device)
    if TRUNCATION_RETURN in rollout.final_features:
        found[rollout.final_index[:, 1]] = rollout.final_features[TRUNCATION_RETURN].to(found)
    return found


def require_whole_episodes(rollout: Rollout) -> None:
    """Raise ContractError unless every column is one whole episode."""
    ends, played = rollout.terminated | rollout.truncated, rollout.valid.any(-1)
    after = ends.long().cumsum(0) - ends.long() > 0
    other = played & ((rollout.seeds != rollout.seeds[:1]) | after)
    wrong = other.any(0) | (ends.sum(0) != 1)
    if wrong.any():
        raise ContractError(
            f"column {int(wrong.nonzero()[0])} of the rollout is not one whole episode, so its return is not known; "
            "collect with GroupSource (vla_rl/experience/groups.py)."
        )
