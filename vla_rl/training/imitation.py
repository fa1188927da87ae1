"""Imitation learning of the chunks of demonstrations, from features that are encoded once, by the policy's own loss.

Grounding: trains the backbone to point at the object that a caption names, on rendered random scenes.

It stands in for the pretraining of a vision-language model.  It uses neither demonstrations nor success labels, but
labels that only a simulator has: the image position of the named object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, ImitationPolicy, mean_loss
from vla_rl.contract.env import Observation
from vla_rl.policies.image_encoder import BackboneOutput
from vla_rl.training.fit import FitConfig, fit, shuffled


@dataclass(frozen=True)
class ImitationConfig:
    """Number of demonstrations and length of training."""

    demonstrations: int = 30  # the first episodes of a dataset, 0 for all
    stride: int = 5  # control steps between the starts of training chunks; 5: one per decision of the policy
    draws: int = 2  # random draws, of noise and time for instance, per chunk and step
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=800, batch=64, lr=1e-3))


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


def imitate_from_pixels(
    policy: Any,
    obs: Observation,
    chunks: Chunks,
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """As :func:`imitate`, backbone included: ``obs`` holds the ``N`` observations before the chunks.

    ``policy`` is an ``ImitationPolicy`` with ``encode_with_grad``.
    """

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        given = policy.encode_with_grad(obs.select(index.numpy()))
        return mean_loss(policy, replace(chunks.select(index), features=given), config.draws, generator), {}

    batches = (index * config.stride for index in shuffled(len(chunks) // config.stride, config.fit.batch, generator))
    fit(dict(policy.named_parameters()), loss, batches, config.fit, report)


@dataclass(frozen=True)
class GroundingConfig:
    """Number of rendered scenes and length of training."""

    scenes: int = 4000
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=500, batch=64, lr=2e-3))
    cell_weight: float = 0.3  # cross-entropy of the attention with the object's cell
    position_weight: float = 3.0  # squared error of the soft-argmax position, image half-widths squared


def pointing_loss(output: BackboneOutput, uv: Tensor, config: GroundingConfig) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy and distance of the queries to ``uv`` [B,P,2]; each of the ``P`` positions gets as many queries.

    ``info["pointing_error"]`` is the mean distance in half-widths.
    """
    side = int(output.logits.shape[-1] ** 0.5)
    uv = uv.repeat_interleave(output.uv.shape[1] // uv.shape[1], dim=1)
    target = cell_weights(uv, side)
    cross = -(target * output.logits.log_softmax(-1)).sum(-1).mean()
    error = output.uv - uv
    loss = config.cell_weight * cross + config.position_weight * error.square().mean()
    return loss, {"pointing_error": float(error.detach().norm(dim=-1).mean())}


def cell_weights(uv: Tensor, side: int) -> Tensor:
    """Bilinear weights [...,side*side] of the cells around ``uv`` [...,2], whose mean position is ``uv`` again.

    A one-hot target would teach the attention to snap to cell centres and cost half a cell of precision.
    """
    position = ((uv.flip(-1) + 1) / 2 * side - 0.5).clamp(0, side - 1)  # (row, column) in cells
    cells = torch.arange(side, dtype=uv.dtype, device=uv.device)
    rows, columns = (1 - (position[..., None] - cells).abs()).clamp_min(0).unbind(-2)
    return (rows[..., :, None] * columns[..., None, :]).flatten(-2)


def ground(
    backbone: nn.Module,
    images: Tensor,
    tokens: Sequence[Tensor],
    uv: Tensor,
    config: GroundingConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train ``backbone(images, *tokens) -> BackboneOutput`` on ``images`` uint8 [N,h,w,3], ``tokens``, each [N,L], and
    ``uv`` [N,P,2]; then freeze it.
    """

    def loss(index: Tensor) -> tuple[Tensor, dict[str, float]]:
        return pointing_loss(backbone(images[index], *(item[index] for item in tokens)), uv[index], config)

    batches = shuffled(len(images), config.fit.batch, generator)
    backbone.train()
    fit(dict(backbone.named_parameters()), loss, batches, config.fit, report)
    backbone.eval().requires_grad_(False)
