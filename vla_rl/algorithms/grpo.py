"""GRPO (Shao et al. 2024, arXiv 2402.03300): PPO's clipped objective on advantages relative to a group; no critic.

    L = - sum_i w_i sum_t min(rho_it A_i, clip(rho_it, 1-eps_low, 1+eps_high) A_i),   rho = exp(log pi - log pi_old)

``i`` counts episodes and ``t`` their decisions (chunks, or their actions or tokens, see ``surrogate.py``); ``A_i`` is
the advantage within the group and ``w_i`` the weight of the episode (``group_relative.py``).

Deviations from the paper: the baseline excludes the episode itself, and advantages are not divided by the std; all
decisions have equal weight, except those after a success, which have none; the upper clip bound is wider, so that rare
good actions can grow (DAPO, arXiv 2503.14476); there is no reference policy, and the trust region is PPO's
(``policy_gradient.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.algorithms.group_relative import Baseline, GroupRelative, GroupRelativeConfig, LeaveOneOut
from vla_rl.algorithms.policy_gradient import clipped_objective
from vla_rl.contract.batch import Reducer
from vla_rl.contract.limits import check_limits, check_positive
from vla_rl.contract.policy import LikelihoodPolicy


@dataclass(frozen=True)
class GRPOConfig(GroupRelativeConfig):
    """Clip bounds are DAPO's; the trust region is that of PPO in the demo."""

    baseline: Baseline = LeaveOneOut()
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "clip_low")
        check_limits(self, clip_low=(0, 1))
        check_positive(self, "clip_high")

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> GRPO:
        """The learner with this config; ``critic`` is ignored."""
        return GRPO(policy, parameters, self, generator, reducer)


class GRPO(GroupRelative):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` in place and returns metrics."""

    config: GRPOConfig

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        config: GRPOConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(policy, parameters, config, generator, reducer)
        self.baseline = config.baseline

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped surrogate and where it was clipped, in the shape of ``ratio``."""
        return clipped_objective(ratio, advantage, self.config.clip_low, self.config.clip_high)
