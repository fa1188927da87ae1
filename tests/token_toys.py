"""A bandit over chunks of discrete actions, some of which end the episode early: toys for likelihoods in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.toys import seeded
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy, LogprobPer

from .toys import rollout

HORIZON, ENTRIES, CHOICES = 3, 2, 3
PARTS: dict[LogprobPer, int] = {"chunk": 1, "action": HORIZON, "token": HORIZON * ENTRIES}
SPEC = EnvSpec(
    name="tokens",
    images={},
    state=ArraySpec((1,), "float32", -1.0, 1.0),
    action=ArraySpec((ENTRIES,), "int64", 0, CHOICES - 1),
    tasks=("choose",),
    control_dt=0.1,
    time_limit=1,
    max_chunk=HORIZON,
)


def token_policy(logprob_per: LogprobPer, std: float = 0.0) -> CategoricalPolicy:
    """Equal weights for every ``logprob_per``; all choices are equally likely unless ``std`` spreads the last layer."""
    torch.manual_seed(0)
    policy = CategoricalPolicy(SPEC, config=CategoricalConfig(HORIZON, 16, 1, logprob_per=logprob_per))
    if std:
        torch.nn.init.normal_(policy.last.weight, std=std, generator=seeded(5))
    return policy


def best(state: Tensor) -> Tensor:
    """The best chunk [B,H,D] in ``state`` [B,1]: the last choice where it is positive, else the first."""
    return ((state > 0) * (CHOICES - 1))[:, None].expand(-1, HORIZON, ENTRIES)


def token_bandit(policy: CategoricalPolicy, groups: int, size: int, generator: torch.Generator) -> Rollout:
    """``size`` decisions in each of ``groups`` random states; each ends its episode after 1 to ``HORIZON`` actions.

    An executed action earns the share of its entries that are the best ones.
    """
    state = (2 * torch.rand(groups, 1, generator=generator) - 1).repeat_interleave(size, 0)
    out, _ = policy.act({"state": state}, {}, "sample", generator)
    counts = torch.randint(1, HORIZON + 1, (groups,), generator=generator).repeat_interleave(size)
    valid = (torch.arange(HORIZON) < counts[:, None])[None]
    reward = (out.sample == best(state)).float().mean(-1)[None] * valid
    seeds = torch.arange(groups).repeat_interleave(size)[None]
    ends = {"terminated": valid[..., 0], "truncated": ~valid[..., 0], "success": ~valid[..., 0]}
    version = torch.full_like(seeds, policy.version)
    return rollout(
        {"state": torch.stack([state, state])}, out, reward, valid=valid, seeds=seeds, version=version, **ends
    )


def right(policy: CategoricalPolicy) -> float:
    """The share of entries that are the best ones in what would be deployed, where the sign of the state is plain."""
    state = torch.linspace(0.1, 1, 100)[:, None]
    state = torch.cat([-state, state])
    out, _ = policy.act({"state": state}, {}, "eval", None)
    return float((out.sample == best(state)).float().mean())
