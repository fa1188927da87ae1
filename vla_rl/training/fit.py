"""The one supervised training loop: minimises any ``loss(batch) -> (loss, info)``.

Imitation learning of the chunks of demonstrations, from features that are encoded once, by the policy's own loss.

Grounding: trains the backbone to point at the object that a caption names, on rendered random scenes.

It stands in for the pretraining of a vision-language model.  It uses neither demonstrations nor success labels, but
labels that only a simulator has: the image position of the named object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, ImitationPolicy, mean_loss
from vla_rl.contract.config import Checked, at_least
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.policy import Features
from vla_rl.evaluation.object_positions import ObjectProbe, ProbeConfig, check
from vla_rl.policies.history import ObservationHistory
from vla_rl.policies.image_encoder import BackboneOutput

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class FitConfig(Checked):
    """AdamW with a linear warm-up and a cosine decay to zero.  Raises UserError for numbers without a meaning."""

    steps: int = at_least(1000, 1)
    batch: int = at_least(64, 1)
    lr: float = at_least(1e-3, 0)
    weight_decay: float = at_least(1e-4, 0)
    warmup: int = at_least(50, 0)
    grad_norm: float = at_least(1.0, 0)


def fit(
    parameters: Mapping[str, nn.Parameter],
    loss: Callable[[Batch], tuple[Tensor, dict[str, float]]],
    batches: Iterable[Batch],
    config: FitConfig,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Take ``config.steps`` optimizer steps on ``batches``; ``report(step, info)`` is called after each.

    Raises NonFiniteError, naming the parameter and the step, before a NaN could enter the weights.
    """
    optimizer = torch.optim.AdamW(parameters.values(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, config))
    for step, batch in zip(range(config.steps), batches, strict=False):
        optimizer.zero_grad(set_to_none=True)
        value, info = loss(batch)
        value.backward()
        norm = nn.utils.clip_grad_norm_(parameters.values(), config.grad_norm)
        if not torch.isfinite(norm):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "all")
            raise NonFiniteError(
                f"the gradient of {bad!r} is not finite at step {step}, so training stopped with the weights of step "
                f"{step - 1}; look for numbers in the data that are not finite or far too large, then lower "
                "the learning rate."
            )
        optimizer.step()
        scheduler.step()
        report(step, {"loss": float(value.detach()), **info})


def lr_factor(step: int, config: FitConfig) -> float:
    """The factor of the learning rate at ``step``."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    return warm * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.steps)))


def shuffled(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless minibatches of indices, a new permutation every epoch, no sample twice in one."""
    while True:
        yield from epoch(count, batch, generator)


def epoch(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Minibatches of indices in random order, no sample twice; what does not fill one is left out."""
    order = torch.randperm(count, generator=generator)
    yield from (part for part in order.split(batch) if len(part) == min(batch, count))


def weighted(weights: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless minibatches of indices, drawn with replacement in proportion to ``weights`` [N]."""
    while True:
        yield torch.multinomial(weights, batch, replacement=True, generator=generator)


# About 25 s on one thread; on lift, with the frames of 300 episodes, 3 mm in the median (held-out episodes).
FIT = FitConfig(steps=600, batch=64, lr=4e-3)


def fit_probe(
    pictures: np.ndarray,
    tasks: np.ndarray,
    positions: np.ndarray,
    generator: torch.Generator,
    config: FitConfig = FIT,
    sizes: ProbeConfig | None = None,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> ObjectProbe:
    """A probe for ``pictures`` uint8 [N,h,w,c], cameras side by side, ``tasks`` [N] and ``positions`` [N,3] metres.

    It knows the tasks up to the highest one given.  ``generator`` chooses the minibatches; weights begin from torch's
    own, so seed that for equal probes.  Raises ContractError for arrays that do not belong together, and for a position
    that is not finite.
    """
    count = int(np.max(tasks, initial=0)) + 1
    check(pictures, tasks, pictures.shape[1:], count)
    if positions.shape != (len(pictures), 3) or not len(pictures) or not np.isfinite(positions).all():
        raise ContractError(
            f"positions {list(positions.shape)} of {len(pictures)} pictures do not say where each object was, so "
            "nothing could be learnt from them; give finite metres [N,3] for at least one picture."
        )
    height, width, channels = pictures.shape[1:]
    probe = ObjectProbe((height, width, channels), count, positions, sizes or ProbeConfig())
    shown, named = torch.from_numpy(np.ascontiguousarray(pictures)), torch.as_tensor(np.asarray(tasks, np.int64))
    targets = torch.as_tensor(positions, dtype=torch.float32)
    batches = (
        {"pictures": shown[part], "tasks": named[part], "positions": targets[part]}
        for part in shuffled(len(shown), config.batch, generator)
    )
    fit(dict(probe.named_parameters()), probe.loss, batches, config, report)
    return probe.eval()


@dataclass(frozen=True)
class ImitationConfig:
    """Number of demonstrations and length of training."""

    demonstrations: int = 30  # the first episodes of a dataset, 0 for all
    stride: int = 5  # control steps between the starts of training chunks; 5: one per decision of the policy
    draws: int = 2  # random draws, of noise and time for instance, per chunk and step
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=800, batch=64, lr=1e-3))


@dataclass(frozen=True)
class RelativeImitationConfig(ImitationConfig):
    """The same for actions that may be relative to the state, which is off by noise that every pass draws anew."""

    state_noise: float = at_least(0.0, 0)  # of the state that actions are relative to, in its standard deviations


def imitate(
    policy: ImitationPolicy,
    blocks: Iterator[tuple[Chunks, Observation | None]],
    config: ImitationConfig,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train on the actions of chunks that count, by the policy's own loss, once through each of ``blocks``.

    They may be the same for ever, and need not be in memory at the same time.  With the observations before the chunks
    the backbone learns as well, of a policy that has ``encode_with_grad``.
    """
    made: Any = policy
    first = next(blocks)

    def batches() -> Iterator[tuple[Chunks, Observation | None, Tensor]]:
        for chunks, obs in chain([first], blocks):
            stride = 1 if obs is None else config.stride
            for index in epoch(len(chunks) // stride, config.fit.batch, generator):
                yield chunks, obs, index * stride

    def loss(batch: tuple[Chunks, Observation | None, Tensor]) -> tuple[Tensor, dict[str, float]]:
        chunks, obs, index = batch
        chosen = chunks.select(index)
        if obs is not None:
            chosen = replace(chosen, features=_encoded_with_grad(made, obs, index.numpy()))
        return mean_loss(policy, chosen, config.draws, generator), {}

    parameters = policy.trainable() if first[1] is None else dict(made.named_parameters())
    fit(parameters, loss, batches(), config.fit, report)


def _encoded_with_grad(policy: Any, obs: Observation, index: np.ndarray) -> Features:
    """The features of ``obs`` at ``index`` [B], and of those before where the policy reads them."""
    features: Features = policy.encode_with_grad(obs.select(index))
    history: ObservationHistory | None = getattr(policy, "history", None)
    if history is None:
        return features
    before = history.steps_before(index, np.asarray(obs.time)).flatten()
    return history.added(features, policy.encode_with_grad(obs.select(before)))


CELL_WEIGHT = 0.3  # of the cross-entropy of the attention with the object's cell
POSITION_WEIGHT = 3.0  # of the squared error of the soft-argmax position, image half-widths squared


@dataclass(frozen=True)
class GroundingConfig:
    """Number of rendered scenes and length of training."""

    scenes: int = 4000
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=500, batch=64, lr=2e-3))


def pointing_loss(output: BackboneOutput, uv: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy and distance of the queries to ``uv`` [B,P,2]; each of the ``P`` positions gets as many queries.

    ``info["pointing_error"]`` is the mean distance in half-widths.
    """
    side = int(output.logits.shape[-1] ** 0.5)
    uv = uv.repeat_interleave(output.uv.shape[1] // uv.shape[1], dim=1)
    target = cell_weights(uv, side)
    cross = -(target * output.logits.log_softmax(-1)).sum(-1).mean()
    error = output.uv - uv
    loss = CELL_WEIGHT * cross + POSITION_WEIGHT * error.square().mean()
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
        return pointing_loss(backbone(images[index], *(item[index] for item in tokens)), uv[index])

    batches = shuffled(len(images), config.fit.batch, generator)
    backbone.train()
    fit(dict(backbone.named_parameters()), loss, batches, config.fit, report)
    backbone.eval().requires_grad_(False)
