"""Advantages relative to a group, without a critic: ``n`` episodes from one initial state, compared with each other.

A group is the set of episodes with one seed: the same task, scene and initial state.  ``R_i`` is the undiscounted sum
of an episode's rewards (a truncated episode adds the return that its source predicts for the rest, and is never left
out), ``m`` the mean over its group, and every decision of the episode has the advantage ``A_i``:

    LeaveOneOut    A_i = R_i - mean of the others' R = n/(n-1) (R_i - m)    E[ grad ] = grad J
    Mean           A_i = R_i - m                                           (1 - 1/n) grad J: the same direction
    Standardised   A_i = (R_i - m) / (std + 1e-6)                          re-weights tasks, see the class

A group of equal returns has advantages of exactly 0.  It stays in the denominators, so the gradient stays unbiased;
only its forward passes are skipped.

GRPO (Shao et al. 2024, arXiv 2402.03300): PPO's clipped objective on advantages relative to a group; no critic.

    L = - sum_i w_i sum_t min(rho_it A_i, clip(rho_it, 1-eps_low, 1+eps_high) A_i),   rho = exp(log pi - log pi_old)

``i`` counts episodes and ``t`` their decisions (chunks, or their actions or tokens, see ``policy_gradient.py``);
``A_i`` is the advantage within the group and ``w_i`` the weight of the episode.

Deviations from the paper: the baseline excludes the episode itself, and advantages are not divided by the std; all
decisions have equal weight, except those after a success, which have none; the upper clip bound is wider, so that rare
good actions can grow (DAPO, arXiv 2503.14476); there is no reference policy, and the trust region is PPO's
(``policy_gradient.py``).

RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE whose baseline is the rest of the group.

    L = - sum_i w_i sum_t rho_it A_i,    A_i = R_i - mean of the others' R,    rho = exp(log pi - log pi_old)

At ``rho = 1`` the gradient is the unbiased policy gradient.  Every rollout is used for one epoch, so ``rho`` corrects
only for earlier minibatches.  Deviations: one ratio per decision and not per episode; no reference policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.algorithms.decisions import Decisions, Gathered, flatten
from vla_rl.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig, clipped_objective, surrogate
from vla_rl.contract.batch import TRUNCATION_RETURN, Reducer, Rollout
from vla_rl.contract.config import above_zero, check_limits
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood

# -- the advantage of an episode --------------------------------------------------------------------------------------


class Baseline:
    """Turns the returns of one group, which are not all equal, into advantages, both float64 [n]."""

    def advantages(self, returns: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """Relative to the mean of the *other* episodes, hence unbiased (Kool et al. 2019)."""

    def advantages(self, returns: Tensor) -> Tensor:
        """``R_i - (sum R - R_i) / (n - 1)``."""
        return returns - (returns.sum() - returns) / (len(returns) - 1)


@dataclass(frozen=True)
class Mean(Baseline):
    """Relative to the mean of all: GRPO without its std (Dr. GRPO, arXiv 2503.20783), scaled by ``1 - 1/n``."""

    def advantages(self, returns: Tensor) -> Tensor:
        """``R_i - m``."""
        return returns - returns.mean()


@dataclass(frozen=True)
class Standardised(Baseline):
    """GRPO as published (Shao et al. 2024, arXiv 2402.03300): divided by the group's std (over ``n - 1``).

    Biased: a task that succeeds with probability p gets weight 2.41 (p = .02), 2.18 (.1), 1.74 (.5) at n = 8, and
    ``1 / sqrt(p (1-p))`` for large n, so it ascends the sum of ``2 arcsin sqrt p`` instead of that of p.
    """

    def advantages(self, returns: Tensor) -> Tensor:
        """``(R_i - m) / (std + 1e-6)``."""
        return (returns - returns.mean()) / (returns.std(correction=1) + 1e-6)


def group_advantages(returns: Tensor, seeds: Tensor, baseline: Baseline) -> Tensor:
    """Advantages float64 [C] of episodes with ``returns`` [C]; equal ``seeds`` int [C] form a group.

    Raises ContractError for a group of one episode.
    """
    advantage = torch.zeros_like(returns, dtype=torch.float64)
    for seed in seeds.unique():
        members = seeds == seed
        group = returns[members].double()
        if len(group) < 2:
            raise ContractError(
                f"the group of seed {int(seed)} has one episode, so its advantage is undefined; give every group two "
                "or more (GroupConfig.size)."
            )
        if (group != group[0]).any():
            advantage[members] = baseline.advantages(group)
    return advantage


# -- how decisions are averaged ----------------------------------------------------------------------------------------


class Averaging:
    """The weights of episodes in the loss: ``L = sum_i w_i sum_t l_it``."""

    def weights(self, decisions: Tensor, reducer: Reducer) -> Tensor:
        """``w`` float64 [C] of episodes with ``decisions`` int [C] usable ones; ``reducer`` sums over processes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Global(Averaging):
    """One over the number of all decisions: equal weights, so the direction is that of the policy gradient."""

    def weights(self, decisions: Tensor, reducer: Reducer) -> Tensor:
        """``1 / N``."""
        total = reducer.sum(decisions.sum().double()).clamp(min=1.0)
        return torch.ones_like(decisions, dtype=torch.float64) / total


@dataclass(frozen=True)
class Constant(Averaging):
    """One over (episodes times ``max_decisions`` of an episode), a constant (Dr. GRPO)."""

    max_decisions: int

    def __post_init__(self) -> None:
        check_limits(self, max_decisions=(1, math.inf))

    def weights(self, decisions: Tensor, reducer: Reducer) -> Tensor:
        """``1 / (C max_decisions)``."""
        return torch.ones_like(decisions, dtype=torch.float64) / (_episodes(decisions, reducer) * self.max_decisions)


@dataclass(frozen=True)
class PerTrajectory(Averaging):
    """One over (episodes times the episode's own length) (WoVR, arXiv 2602.13977; also the published GRPO).

    **Not a policy gradient of success**: lengths that depend on the outcome can flip its sign.  An action with 50 %
    success (1 decision to succeed, 4 to fail) is preferred to one with 55 % (3 and 4).  Use it for comparisons only.
    """

    def weights(self, decisions: Tensor, reducer: Reducer) -> Tensor:
        """``1 / (C T_i)``."""
        return 1.0 / (_episodes(decisions, reducer) * decisions.double().clamp(min=1.0))


def _episodes(decisions: Tensor, reducer: Reducer) -> Tensor:
    return reducer.sum(torch.tensor(float(len(decisions)), dtype=torch.float64, device=decisions.device))


# -- the learner -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupRelativeConfig(PolicyGradientConfig):
    """The fields that GRPO and RLOO share."""

    averaging: Averaging = Global()


class GroupRelative(PolicyGradient[Decisions]):
    """A ``Learner`` from whole episodes in groups, one episode per column (collected by ``experience/groups.py``).

    The usable decisions are the policy's own up to an episode's first success, that decision included: neither idle
    ones nor those after the success.  An intervention cuts the episode: neither it nor what follows is used, and the
    return counts the rewards before it, with nothing for the rest since there is no critic to bootstrap from.  So a
    person's rescue is not the policy's success.  Those of older policy versions are treated as ``policy_gradient.py``
    says; the ones beyond ``max_age`` leave the denominators as well.  The metric ``rollout/truncated`` is the share of
    truncated episodes; those of other learners do not count in it, nor in ``rollout/return``.
    """

    config: GroupRelativeConfig

    @property
    def baseline(self) -> Baseline:
        """What the return of an episode is compared with."""
        return LeaveOneOut()

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The objective to maximise, and where it was clipped, in the shape of ``ratio``."""
        raise NotImplementedError

    def policy_loss(self, minibatch: Decisions, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The negative weighted objective, and the clipped share of each sample's parts."""
        return surrogate(minibatch, new.logprob, self.objective)

    @torch.no_grad()
    def _make_batch(self, rollout: Rollout) -> tuple[Decisions, dict[str, float]]:
        require_whole_episodes(rollout)
        own = before_intervention(rollout)
        returns = torch.where(rollout.valid & own[..., None], rollout.reward.double(), 0.0).sum((0, 2))
        advantage = group_advantages(returns + truncation_return(rollout), rollout.seeds[0], self.baseline)
        metrics: dict[str, float] = {}
        usable, age = self._usable(rollout, metrics)
        usable &= own & before_success(rollout)
        weight = self.config.averaging.weights(usable.sum(0), self.reducer)
        used = usable & (advantage != 0)
        weight = weight * self._sum(float(used.sum()))
        batch = Decisions(
            Gathered.where(rollout.features, used),
            flatten(rollout.sample, used),
            {name: flatten(item, used) for name, item in rollout.aux.items()},
            flatten(rollout.logprob, used),
            flatten(advantage.expand_as(used), used).to(rollout.logprob.dtype),
            flatten(weight.expand_as(used), used).to(rollout.logprob.dtype),
            flatten(age, used),
            flatten(rollout.valid, used),
        )
        metrics["rollout/return"] = float(returns.mean())
        metrics["rollout/truncated"] = float(rollout.truncated.any(0).double().mean())
        return batch, {"rollout/decisions": float(used.sum()), **metrics}


def before_success(rollout: Rollout) -> Tensor:
    """bool [T,C]: the decisions up to the first success of their episode, that one included."""
    success = rollout.success.long()
    after = success.cumsum(0) - success > 0
    return ~after


def before_intervention(rollout: Rollout) -> Tensor:
    """bool [T,C]: the decisions before the first one in which a person acted."""
    return rollout.intervened.any(-1).long().cumsum(0) == 0


def truncation_return(rollout: Rollout) -> Tensor:
    """float64 [C]: predicted return after a truncation, 0 for other episodes and sources without a prediction.

    It is also 0 for an episode that has succeeded, whose reward is paid, or in which a person acted.
    """
    value = torch.zeros(rollout.valid.shape[1], dtype=torch.float64, device=rollout.valid.device)
    if TRUNCATION_RETURN in rollout.final_features:
        value[rollout.final_index[:, 1]] = rollout.final_features[TRUNCATION_RETURN].to(value)
    return torch.where(rollout.success.any(0) | rollout.intervened.any(-1).any(0), 0.0, value)


def require_whole_episodes(rollout: Rollout) -> None:
    """Raise ContractError unless every column is one whole episode."""
    ends, active = rollout.terminated | rollout.truncated, rollout.valid.any(-1)
    after = ends.long().cumsum(0) - ends.long() > 0
    other = active & ((rollout.seeds != rollout.seeds[:1]) | after)
    wrong = other.any(0) | (ends.sum(0) != 1)
    if wrong.any():
        raise ContractError(
            f"column {int(wrong.nonzero()[0])} of the rollout is not one whole episode, so its return is unknown; "
            "collect with GroupSource (vla_rl/experience/groups.py)."
        )


@dataclass(frozen=True)
class GRPOConfig(GroupRelativeConfig):
    """Clip bounds are DAPO's; the trust region is that of PPO in the demo."""

    baseline: Baseline = LeaveOneOut()
    clip_low: float = above_zero(0.2, 1)
    clip_high: float = above_zero(0.28)


class GRPO(GroupRelative, config=GRPOConfig):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` in place and returns metrics."""

    config: GRPOConfig

    @property
    def baseline(self) -> Baseline:
        return self.config.baseline

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped surrogate and where it was clipped, in the shape of ``ratio``."""
        return clipped_objective(ratio, advantage, self.config.clip_low, self.config.clip_high)


@dataclass(frozen=True)
class RLOOConfig(GroupRelativeConfig):
    """One epoch of small steps, since only the KL stop and the adaptive learning rate bound them.

    ``target_kl`` is much lower than GRPO's: it is compared with the mean over the only epoch, most of which precedes
    most steps.  On lift (one seed, 240,000 control steps, validation) success fell to 39 % with 0.04 and minibatches of
    320, and rose to 76 % with these, as GRPO's did.
    """

    epochs: int = 1
    minibatch: int = 128  # decisions
    target_kl: float = 0.003


class RLOO(GroupRelative, config=RLOOConfig):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` in place and returns metrics."""

    config: RLOOConfig

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """``rho A``; without clipping."""
        return ratio * advantage, torch.zeros_like(ratio)
