"""Imitation of decisions that are gathered while playing: what HG-DAgger and self-imitation share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, ChunkSampler, TasksEqually, joined, mean_loss, require_actionwise
from vla_rl.contract.config import check_limits, check_positive
from vla_rl.contract.errors import NonFiniteError


@dataclass(frozen=True)
class GradientConfig:
    """What a gradient step is made of, and the weight of demonstrations."""

    batch: int = 64  # decisions to imitate in a step, and as many demonstrations
    draws: int = 2  # random draws, of noise and time for instance, per decision and step
    alpha: float = 1.0  # weight of the demonstrations
    capacity: int = 50_000  # decisions that are kept
    lr: float = 3e-4
    weight_decay: float = 1e-4
    grad_norm: float = 1.0

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, batch=count, draws=count, capacity=count)
        check_limits(self, alpha=(0, math.inf), weight_decay=(0, math.inf))
        check_positive(self, "lr", "grad_norm")


Config = TypeVar("Config", bound=GradientConfig)


class ChunkLearner(Generic[Config]):
    """Imitates the decisions that it keeps, and demonstrations: what HG-DAgger and self-imitation share."""

    name, imitated = "", ""  # of the algorithm; of what is kept, in metrics

    def __init__(
        self,
        policy: object,
        parameters: Mapping[str, nn.Parameter],
        demonstrations: Chunks | None,
        config: Config,
        generator: torch.Generator,
        sampler: ChunkSampler | None = None,
    ) -> None:
        """``demonstrations`` None: what is kept alone; ``sampler`` chooses of both, None: ``TasksEqually``.

        Raises UserError for a policy without a loss for every action (``ActionwiseImitation``).
        """
        self._sampler = sampler or TasksEqually()
        self.policy, self.config = require_actionwise(policy, self.name), config
        self.parameters, self.generator = dict(parameters), generator
        self.demonstrations = demonstrations if config.alpha and demonstrations else None
        self.kept: Chunks | None = None
        self.steps = 0
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=True)

    def loss(self, kept: Chunks) -> tuple[Tensor, dict[str, float]]:
        """The imitation loss of drawn decisions, and metrics."""
        loss = mean_loss(self.policy, kept, self.config.draws, self.generator)
        return loss, {f"policy/{self.imitated}_loss": float(loss.detach())}

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def keep(self, new: Chunks) -> int:
        """Keep ``new`` decisions to imitate; returns how many they are."""
        if len(new):
            self.kept = self._newest(joined([self.kept, new]) if self.kept else new)
        return len(new)

    def step(self, kept: Chunks) -> dict[str, float]:
        """One gradient step."""
        config = self.config
        loss, metrics = self.loss(self._drawn(kept))
        if self.demonstrations is not None:
            recorded = mean_loss(self.policy, self._drawn(self.demonstrations), config.draws, self.generator)
            metrics["policy/demonstration_loss"] = float(recorded.detach())
            loss = loss + config.alpha * recorded
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(trained, config.grad_norm))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient of {self.name}'s step {self.steps} is not finite, so the step was not taken; lower the "
                "learning rate or look for NaN in what was recorded."
            )
        self.optimizer.step()
        self.steps += 1
        return {**metrics, "policy/loss": float(loss.detach()), "policy/grad_norm": norm}

    def _drawn(self, chunks: Chunks) -> Chunks:
        human = torch.ones_like(chunks.task, dtype=torch.bool)
        return chunks.select(self._sampler.draw(chunks, human, self.config.batch, self.generator))

    def _newest(self, kept: Chunks) -> Chunks:
        return kept.select(torch.arange(len(kept))[-self.config.capacity :])

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, what is kept, generator and counter (see ``Resumable``); demonstrations are the run's."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "kept": self.kept.to_state() if self.kept else {},
            "generator": self.generator.get_state(),
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.kept = Chunks(**state["kept"]) if state["kept"] else None
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]
