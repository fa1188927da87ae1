"""HG-DAgger (Kelly et al. 2019, arXiv 1810.02890): a person takes over when needed, and the policy imitates that.

The robot acts by itself; a person takes over where it goes wrong and hands back when all is well again.  What the
person did is aggregated, ``D <- D + {(o, a_human)}``, and the policy imitates

    L = sum_D m_h l_h / sum_D m_h + alpha mean_demonstrations l_h

where ``l_h`` is the policy's own imitation loss of action ``h`` of a chunk (flow matching for a flow policy) and
``m_h`` is 1 where the person chose it: a person who takes over in the middle of a chunk is imitated from there on.  The
chunk's other actions are an input of a flow, as executed and with noise, but no target.  Tasks are equally likely.

Versions do not matter: the target is what a person did in a state, whoever led there.  So there is neither a bound of
staleness nor an importance weight; the oldest corrections leave when there are more than ``capacity``.

Deviations: demonstrations enter by a weight of their own and not by their number (theirs would outweigh the first
corrections); the paper's risk estimate, an ensemble's doubt above which a person should watch, is not part of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vla_rl.algorithms.chunks import (
    Chunks,
    ChunkSampler,
    TasksEqually,
    chunks_of,
    joined,
    mean_loss,
    require_actionwise,
)
from vla_rl.algorithms.decisions import ages
from vla_rl.algorithms.off_policy import mean
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import NonFiniteError
from vla_rl.contract.limits import check_limits, check_positive


@dataclass(frozen=True)
class HGDaggerConfig:
    """The schedule of gradient steps, and the weight of demonstrations."""

    steps: int = 50  # gradient steps per rollout, once there are corrections
    batch: int = 64  # decisions with a correction in a step, and as many demonstrations
    draws: int = 2  # random draws, of noise and time for instance, per decision and step
    alpha: float = 1.0  # weight of the demonstrations
    capacity: int = 50_000  # corrected decisions that are kept
    lr: float = 3e-4
    weight_decay: float = 1e-4
    grad_norm: float = 1.0

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, steps=count, batch=count, draws=count, capacity=count)
        check_limits(self, alpha=(0, math.inf), weight_decay=(0, math.inf))
        check_positive(self, "lr", "grad_norm")


class HGDagger:
    """A ``LoopLearner`` of a policy with a loss for every action (``ActionwiseImitation``)."""

    def __init__(
        self,
        policy: object,
        parameters: Mapping[str, nn.Parameter],
        demonstrations: Chunks | None,
        config: HGDaggerConfig,
        generator: torch.Generator,
        sampler: ChunkSampler | None = None,
    ) -> None:
        """``demonstrations`` None: corrections alone; ``sampler`` chooses of both, None: ``TasksEqually``.

        Raises UserError for a policy without such a loss.
        """
        self._sampler = sampler or TasksEqually()
        self.policy, self.config = require_actionwise(policy, "HG-DAgger"), config
        self.parameters, self.generator = dict(parameters), generator
        self.demonstrations = demonstrations if config.alpha and demonstrations else None
        self.corrections: Chunks | None = None
        self.steps = 0
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=True)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add what a person did in ``rollout``, then take the gradient steps; none while nobody has intervened.

        Raises NonFiniteError before a NaN could enter the weights, and ContractError for a decision of a version that
        the learner has not reached.
        """
        acted, all_steps = float((rollout.intervened & rollout.valid).sum()), float(rollout.valid.sum())
        metrics = {
            "rollout/intervened": acted / max(1.0, all_steps),
            "rollout/decisions": float(self.add(rollout)),
            "replay/corrections": float(len(self.corrections) if self.corrections else 0),
        }
        return {**metrics, **self.learn(self.config.steps)}

    def add(self, rollout: Rollout) -> int:
        """Keep the decisions of ``rollout`` in which a person acted; returns how many.

        Raises ContractError for a decision of a version that the learner has not reached.
        """
        human = rollout.intervened & rollout.valid
        ages(rollout, self.policy.version)
        new = chunks_of(rollout, human, self.policy)
        if len(new):
            self.corrections = self._newest(joined([self.corrections, new]) if self.corrections else new)
        return len(new)

    def learn(self, steps: int) -> dict[str, float]:
        """Take so many gradient steps; none, and no metrics, while nobody has intervened."""
        if self.corrections is None:
            return {}
        return mean([self.step(self.corrections) for _ in range(steps)])

    def step(self, corrections: Chunks) -> dict[str, float]:
        """One gradient step."""
        config = self.config
        loss = mean_loss(self.policy, self._drawn(corrections), config.draws, self.generator)
        metrics = {"policy/correction_loss": float(loss.detach())}
        if self.demonstrations is not None:
            recorded = mean_loss(self.policy, self._drawn(self.demonstrations), config.draws, self.generator)
            metrics["policy/demonstration_loss"] = float(recorded.detach())
            loss = loss + config.alpha * recorded
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), config.grad_norm))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient of HG-DAgger's step {self.steps} is not finite, so the step was not taken; lower the "
                "learning rate or look for NaN in what was recorded."
            )
        self.optimizer.step()
        self.steps += 1
        return {**metrics, "policy/loss": float(loss.detach()), "policy/grad_norm": norm}

    def _drawn(self, chunks: Chunks) -> Chunks:
        human = torch.ones_like(chunks.task, dtype=torch.bool)
        return chunks.select(self._sampler.draw(chunks, human, self.config.batch, self.generator))

    def _newest(self, corrections: Chunks) -> Chunks:
        return corrections.select(torch.arange(len(corrections))[-self.config.capacity :])

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, corrections, generator and counter (see ``Resumable``); demonstrations are the run's."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "corrections": self.corrections.to_state() if self.corrections else {},
            "generator": self.generator.get_state(),
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.corrections = Chunks(**state["corrections"]) if state["corrections"] else None
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]
