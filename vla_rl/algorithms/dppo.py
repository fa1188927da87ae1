"""DPPO (Ren et al. 2024, arXiv 2409.00588): PPO in which every denoising step is an action.

The decision process has two layers: decision ``j`` (with the value, reward and GAE of ``ppo.py``) consists of the steps
``k = 0..K'-1`` of a chain, noisiest first, and only the last step is rewarded.  Each step has a ratio:

    L_pi = -E_j[ sum_k min(rho_jk A_jk, clip(rho_jk, 1 - s_k eps_low, 1 + s_k eps_high) A_jk) ]
    rho_jk = exp(log p_k(x_{k+1} | x_k) - log p_k,old),    A_jk = gamma_d^(K'-1-k) A_j
    s_k = f + (1 - f) (e^(c k/(K'-1)) - 1) / (e^c - 1)

With ``gamma_d`` = 1 the gradient before the first update is the exact gradient of the chain; smaller values trade bias
for variance in the noisy steps.

Deviations from the paper's code: a step's log-prob is the sum over its dimensions, not their clamped mean (with which
the ratio is no importance ratio and an eps of .01 allows (1.01)^(H D) - 1, or .22 for 5 actions of 4 entries); the
steps are summed, not averaged, and share a minibatch, so that the network runs once for all of them; the trust region,
epochs and learning rates are those of ``policy_gradient.py``; rewards are not scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.policy_gradient import clipped_objective
from vla_rl.algorithms.ppo import PPO, PPOConfig, _Batch
from vla_rl.contract.config import above_zero, within
from vla_rl.contract.policy import Likelihood


@dataclass(frozen=True)
class DPPOConfig(PPOConfig):
    """``clip_low`` and ``clip_high`` bound the last step's ratio, summed over all dimensions.

    The paper's .01 of a mean equals .22 for 20 dimensions; its noisiest step has a tenth of the bounds, as here.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    gamma_denoise: float = within(0.99, 0, 1)
    clip_first: float = above_zero(0.1, 1)  # the noisiest step's bounds as a share of the last one's
    clip_rate: float = above_zero(3.0)  # above 0; larger values widen the bounds later in the chain


class DPPO(PPO, config=DPPOConfig):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` and ``critic`` in place and returns metrics.

    Raises UserError when the policy's steps have no density.
    """

    config: DPPOConfig
    policy: Any  # a LikelihoodPolicy with step_logprob
    needs = ("log_prob", "kl", "step_logprob")
    otherwise = "so its steps have no ratios; choose a diffusion policy, or PPO, which needs only the joint density."

    def _with_proximal(self, batch: _Batch, old: Likelihood, metrics: dict[str, float]) -> _Batch:
        """``batch`` with the log-probs [B,K'] of its steps before the first epoch; recorded is only their sum."""
        steps = self.policy.step_logprob(batch.aux, old.params)
        return replace(super()._with_proximal(batch, old, metrics), logprob=steps)

    def policy_loss(self, minibatch: _Batch, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The negative clipped surrogate summed over steps, and the clipped share of each sample's steps."""
        ratio = (self.policy.step_logprob(minibatch.aux, new.params) - minibatch.logprob).exp()
        steps = ratio.shape[1]
        shares = clip_shares(steps, self.config.clip_first, self.config.clip_rate)
        loss, clipped = torch.zeros((), dtype=ratio.dtype, device=ratio.device), torch.zeros_like(ratio[:, 0])
        for k, share in enumerate(shares):
            advantage = self.config.gamma_denoise ** (steps - 1 - k) * minibatch.advantage
            bounds = share * self.config.clip_low, share * self.config.clip_high
            objective, outside = clipped_objective(ratio[:, k], advantage, *bounds)
            loss, clipped = loss - (minibatch.weight * objective).mean(), clipped + outside / steps
        return loss, clipped


def clip_shares(steps: int, first: float, rate: float) -> list[float]:
    """Every step's clip bounds as a share of the last one's, from ``first`` to 1; [1] for a single step."""
    if steps == 1:
        return [1.0]
    return [first + (1 - first) * math.expm1(rate * k / (steps - 1)) / math.expm1(rate) for k in range(steps)]
