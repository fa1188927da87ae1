"""Recorded log-probs against the learner's own: stale decisions are weighted, numerics corrected, errors refused.

A decision of the learner's own version has the density that it was sampled from, up to rounding.  Where the two differ
by more than ``max_logprob_gap``, all log-probs of that version are recomputed and the metrics say so; a difference
that rounding cannot explain is an error (:func:`check_density`).  A decision of an *older* version really has another
density, and gets the decoupled objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298):

    w min(rho A, clip(rho) A),   w = min(pi_prox / pi_behaviour, w_max),   rho = pi / pi_prox

``pi_behaviour`` is the recorded density and ``pi_prox`` that of the policy at the start of the update, computed once.
Deviation from AReaL: weights above ``w_max`` are truncated, not dropped.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from vla_rl.algorithms.decisions import B
from vla_rl.algorithms.surrogate import for_parts, joint
from vla_rl.contract.batch import Reducer
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood

BF16_ERROR = 0.011  # std of a log-ratio per sqrt(term), bfloat16 acting against float32 learning
NOISY = 0.2  # std of a Gaussian term with a mean within [-1, 1] down to which that holds
SYSTEMATIC = 0.1  # nats of mean gap that rounding, which has no preferred sign, does not reach


class Limits(Protocol):
    """The fields of a config that this module reads."""

    @property
    def max_logprob_gap(self) -> float: ...

    @property
    def max_importance_weight(self) -> float: ...


def use_proximal(batch: B, old: Likelihood, limits: Limits, reducer: Reducer) -> tuple[B, dict[str, float]]:
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
