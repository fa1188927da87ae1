"""Imitation: flow matching on the chunks of demonstrations, from features that were stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.policy import Stored
from vla_rl.policies.flow import VelocityField, flow_matching_loss
from vla_rl.training.fit import FitConfig, fit, shuffled


@dataclass(frozen=True)
class ImitationConfig:
    """How many demonstrations and how long they are studied."""

    demonstrations: int = 30
    stride: int = 5  # control steps between the chunks that are learnt; 5: one per decision of the policy
    draws: int = 2  # (noise, time) pairs per chunk and step
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=800, batch=64, learning_rate=1e-3))


class FlowPolicy(Protocol):
    """A policy with a velocity field over normalised chunks."""

    def field(self, stored: Stored) -> VelocityField: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...


def imitate(
    policy: FlowPolicy,
    stored: Mapping[str, Tensor],
    chunks: Tensor,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train on ``stored`` {name: [N,...]} and normalised ``chunks`` [N,H,D].

    The loss is conditional flow matching (Lipman et al. 2022, arXiv 2210.02747) with uniform times.
    """

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        index = index.repeat(config.draws)
        target = chunks[index].flatten(1)
        noise = torch.randn(target.shape, generator=generator)
        time = torch.rand(len(target), generator=generator)
        given = {name: value[index] for name, value in stored.items()}
        return flow_matching_loss(policy.field(given), target, noise, time).mean(), {}

    fit(policy.trainable(), loss, shuffled(len(chunks), config.fit.batch, generator), config.fit, report)
