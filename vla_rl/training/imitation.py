"""Imitation learning of the chunks of demonstrations, from features that are encoded once, by the policy's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, Imitation, mean_loss
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import Features
from vla_rl.training.fit import FitConfig, fit, shuffled


@dataclass(frozen=True)
class ImitationConfig:
    """Number of demonstrations and length of training."""

    demonstrations: int = 30  # the first episodes of a dataset, 0 for all
    stride: int = 5  # control steps between the starts of training chunks; 5: one per decision of the policy
    draws: int = 2  # random draws, of noise and time for instance, per chunk and step
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=800, batch=64, lr=1e-3))


class ImitationPolicy(Imitation, Protocol):
    """A policy whose imitation loss trains some of its weights."""

    def trainable(self) -> dict[str, nn.Parameter]: ...


def imitate(
    policy: ImitationPolicy,
    chunks: Chunks,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train on the actions of ``chunks`` that count, by the policy's own loss."""

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        return mean_loss(policy, chunks.select(index), config.draws, generator), {}

    fit(policy.trainable(), loss, shuffled(len(chunks), config.fit.batch, generator), config.fit, report)


class PixelImitationPolicy(ImitationPolicy, Protocol):
    """A policy whose vision backbone can be trained as well."""

    def encode_with_grad(self, obs: Observation) -> Features: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def imitate_from_pixels(
    policy: PixelImitationPolicy,
    obs: Observation,
    chunks: Chunks,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """As :func:`imitate`, backbone included: ``obs`` holds the ``N`` observations before the chunks."""

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        given = policy.encode_with_grad(obs.select(index.numpy()))
        return mean_loss(policy, replace(chunks.select(index), features=given), config.draws, generator), {}

    batches = (index * config.stride for index in shuffled(len(chunks) // config.stride, config.fit.batch, generator))
    fit(dict(policy.named_parameters()), loss, batches, config.fit, report)
