"""Imitation learning of the chunks of demonstrations, from features that are encoded once, by the policy's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

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


class ImitationPolicy(Protocol):
    """A policy with an imitation loss of its own, such as flow matching or denoising."""

    def imitation_loss(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """The scalar loss: the mean over normalised ``chunks`` [B,H,D], each with ``draws`` random draws.

        ``features`` {name: [B,...]} are those of the observations before the chunks.
        """

    def trainable(self) -> dict[str, nn.Parameter]: ...


def imitate(
    policy: ImitationPolicy,
    features: Mapping[str, Tensor],
    chunks: Tensor,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train on ``features`` {name: [N,...]} and normalised ``chunks`` [N,H,D] by the policy's own loss."""

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        given = {name: value[index] for name, value in features.items()}
        return policy.imitation_loss(given, chunks[index], config.draws, generator), {}

    fit(policy.trainable(), loss, shuffled(len(chunks), config.fit.batch, generator), config.fit, report)


class PixelImitationPolicy(ImitationPolicy, Protocol):
    """A policy whose vision backbone can be trained as well."""

    def encode_with_grad(self, obs: Observation) -> Features: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def imitate_from_pixels(
    policy: PixelImitationPolicy,
    obs: Observation,
    chunks: Tensor,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """As :func:`imitate`, backbone included: ``obs`` holds the ``N`` observations before the chunks."""

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        given = policy.encode_with_grad(obs.select(index.numpy()))
        return policy.imitation_loss(given, chunks[index], config.draws, generator), {}

    batches = (index * config.stride for index in shuffled(len(chunks) // config.stride, config.fit.batch, generator))
    fit(dict(policy.named_parameters()), loss, batches, config.fit, report)
