"""Where an episode goes on to, as an auxiliary loss: it teaches a backbone to see what the policy has to reach.

    L = |g(phi(o_t), s_t) - (s_{t+1}, ..., s_{t+K})|^2 / (K S)

where ``phi`` are the features of the policy's backbone, with gradient, ``s_{t+k}`` the robot's normalised state ``k``
decisions later and ``g`` a small head, which is no part of the policy.  In an episode that succeeded the gripper went
to the object that the instruction names and then to its goal, so a few states of the robot say where both are, and that
is all that the loss knows: it needs neither labels nor a simulator.  (Predicting future measurements: Dosovitskiy and
Koltun 2017, arXiv 1611.01779; auxiliary losses for what an agent sees: Jaderberg et al. 2017, arXiv 1611.05397.)

Deviations: the states are those of what was played, and not of each action that could be; the same action is imitated
beside it.  What lies after an episode's last decision has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import ActionwiseImitation
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import Features

FUTURE = "future_states"  # the feature [N,K*S] that is to be predicted


@runtime_checkable
class LearningBackbone(ActionwiseImitation, Protocol):
    """A policy whose backbone can learn as well, from pictures that its features keep."""

    def with_trained_backbone(self) -> Self:
        """Keep pictures in features from now on and let the backbone be trained; returns ``self``."""

    @property
    def feature_sizes(self) -> Mapping[str, int]:
        """Sizes of the features that heads read, by name; ``state`` is the robot's."""

    def encode_again(self, features: Features) -> Features:
        """``features`` as today's backbone makes them of their pictures, with gradient."""


@dataclass(frozen=True)
class FutureStatesConfig:
    """How far ahead, and how much it weighs beside imitation."""

    decisions: int = 8  # K
    weight: float = 1.0  # of the mean squared error of normalised states
    width: int = 256  # of the head

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, decisions=count, width=count, weight=(0, math.inf))


class FutureStates(nn.Module):
    """The head ``g``, for features of ``sizes``."""

    def __init__(self, sizes: Mapping[str, int], config: FutureStatesConfig) -> None:
        super().__init__()
        self.read, self.config = tuple(sizes), config
        outputs = config.decisions * sizes["state"]
        self.net = nn.Sequential(
            nn.Linear(sum(sizes.values()), config.width), nn.SiLU(), nn.Linear(config.width, outputs)
        )

    def loss(self, features: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of ``features["future_states"]`` as predicted from the others, where there are any."""
        predicted, known = self.net(torch.cat([features[name] for name in self.read], -1)), ~features[FUTURE].isnan()
        missed = (predicted - features[FUTURE].nan_to_num()).square() * known
        return missed.sum() / known.sum().clamp_min(1)


def require_learning_backbone(policy: object, needed_by: str) -> LearningBackbone:
    """``policy``; raises UserError when its backbone cannot learn."""
    if not isinstance(policy, LearningBackbone):
        raise UserError(
            f"{needed_by} teaches a backbone to foresee states, and {type(policy).__name__} has none that learns "
            "(encode_again), so nothing would come of it; use a TinyVLA, or leave the backbone frozen (rl.future:none)."
        )
    return policy


def following(state: Tensor, ends: Tensor, decisions: int) -> Tensor:
    """The states [T,E,K*S] of the next ``decisions`` of the same episode, of ``state`` [T,E,S]; ``ends`` bool [T,E].

    Nan beyond an episode's last decision, or the window's.
    """
    steps = torch.arange(len(ends), device=ends.device)[:, None].expand(ends.shape)
    last = torch.where(ends, steps, len(ends) - 1).flip(0).cummin(0).values.flip(0)
    ahead = steps[..., None] + torch.arange(1, decisions + 1, device=ends.device)
    rows = torch.arange(ends.shape[1], device=ends.device)[:, None]
    found = state[ahead.clamp_max(len(ends) - 1), rows]
    return found.masked_fill((ahead > last[..., None])[..., None], torch.nan).flatten(2)
