"""Cal-QL (Nakamoto et al. 2023, arXiv 2303.05479): CQL (Kumar et al. 2020, arXiv 2006.04779), calibrated, on SAC.

    y   = R + gamma^m (1 - terminated) max_{i <= n} min_{k in M} Q'_k(o', a'_i),  a'_i ~ pi(.|o')
    L_Q = sum_k E (Q_k(o, a) - y)^2
          + alpha sum_k E [log sum_i exp(Q~_k(o, a_i) - log mu(a_i)) - Q_k(o, a)]
    Q~(o, a_i) = max(Q(o, a_i), G(o)) for actions of the policy, Q(o, a_i) for uniform ones

The ``a_i`` are n uniform actions, n of pi(.|o) and n of pi(.|o'), and ``mu`` is what each was drawn from: the sum
estimates the integral of exp Q over all actions.  G is the return that the recorded episode had from o on: a lower
bound of what the best policy earns there, so values are not pushed below it, and online learning does not begin by
unlearning.  Where the return is unknown (-inf, a truncated episode) there is no bound, which is CQL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.policy import CriticAction


@dataclass(frozen=True)
class CalQLConfig(SACConfig):
    """The numbers of Cal-QL; ``offline_steps`` of it, and online the same loss goes on."""

    num_critics: int = 10
    lr: float = 1e-4
    conservatism: float = 5.0  # alpha of the penalty
    actions: int = 10  # n

    @property
    def learner(self) -> type[CalQL]:
        return CalQL


class CalQL(SAC):
    """SAC whose critics are held down where nothing was recorded; the entropy stays out of its targets."""

    config: CalQLConfig

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        made = self._draw(batch.next_features)
        values = self.min_target_q(repeated(batch.next_features, self.config.actions), made.action)
        return batch.reward + batch.discount * values.view(-1, self.config.actions).amax(1)

    def regularizer(self, batch: Transitions, value: Tensor) -> Tensor:
        """The penalty, for critics that give the recorded actions ``value`` [K,B]."""
        count, rows = self.config.actions, value.shape[1]
        with torch.no_grad():
            now, then = self._draw(batch.features), self._draw(batch.next_features)
            uniform = 2.0 * torch.rand(now.action.shape, generator=self.generator, dtype=now.action.dtype) - 1.0
        entries = uniform.shape[-1]
        actions = torch.cat([part.view(rows, count, entries) for part in (uniform, now.action, then.action)], 1)
        values = self.critic(repeated(batch.features, 3 * count), actions.flatten(0, 1)).view(-1, rows, 3 * count)
        logprob = torch.cat([now.logprob.view(rows, count), then.logprob.view(rows, count)], 1)
        tried, chosen = values.split([count, 2 * count], 2)
        penalty = conservative_penalty(tried, chosen, logprob, value, batch.returns, entries)
        return self.config.conservatism * penalty.mean(1).sum()

    def _draw(self, features: Mapping[str, Tensor]) -> CriticAction:
        """``n`` decisions for each of ``B`` rows: action [B*n,A], logprob [B*n], those of one row side by side."""
        return self.policy.rsample(repeated(features, self.config.actions), self.generator)


def conservative_penalty(
    uniform: Tensor, chosen: Tensor, logprob: Tensor, recorded: Tensor, bound: Tensor, entries: int
) -> Tensor:
    """How much more is thought of other actions than of the recorded one, [K,B].

    Values: ``uniform`` [K,B,N] of actions drawn uniformly from [-1, 1]^entries, ``chosen`` [K,B,M] of the policy's,
    drawn with ``logprob`` [B,M] and held to be at least ``bound`` [B], and ``recorded`` [K,B].  First the bound, then
    the weight: the bound is on values, not on weighted ones.
    """
    others = torch.maximum(chosen, bound[:, None]) - logprob
    everything = torch.cat([uniform - entries * math.log(0.5), others], -1)
    return everything.logsumexp(-1) - recorded


def repeated(features: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Every row ``count`` times, side by side."""
    return {name: item.repeat_interleave(count, 0) for name, item in features.items()}
