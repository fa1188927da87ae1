"""The one supervised training loop: minimises any ``loss(batch) -> (loss, info)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import NonFiniteError

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class FitConfig:
    """AdamW with a linear warm-up and a cosine decay to zero.  Raises UserError for numbers without a meaning."""

    steps: int = 1000
    batch: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-4
    warmup: int = 50
    grad_norm: float = 1.0

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, steps=count, batch=count, lr=(0, math.inf), weight_decay=(0, math.inf))
        check_limits(self, warmup=(0, math.inf), grad_norm=(0, math.inf))


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
        order = torch.randperm(count, generator=generator)
        yield from (part for part in order.split(batch) if len(part) == min(batch, count))


def weighted(weights: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless minibatches of indices, drawn with replacement in proportion to ``weights`` [N]."""
    while True:
        yield torch.multinomial(weights, batch, replacement=True, generator=generator)
