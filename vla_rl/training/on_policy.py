"""The on-policy loop: collect, learn, publish; validate now and then; return to the best weights after a collapse."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, Learner, PolicyStore
from vla_rl.contract.policy import LikelihoodPolicy
from vla_rl.evaluation.stats import Rate


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and how to watch over it."""

    iterations: int = 110
    validate_every: int = 20
    collapse: float = 0.15  # a validation this far below the best one sends the run back to the best weights
    collapse_rate: float = 0.5  # and multiplies the learning rate


class OnPolicyLearner(Learner, Protocol):
    """A learner whose weights the loop may keep, publish and put back, at a lower rate after a collapse."""

    parameters: dict[str, nn.Parameter]
    learning_rate: float


class AlgorithmConfig(Protocol):
    """The frozen dataclass of one algorithm's numbers, which knows its learner."""

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
    ) -> OnPolicyLearner:
        """A learner that improves ``policy`` (through ``parameters``) and ``critic`` in place."""


@dataclass
class Best:
    """The weights with the highest validation success so far (the later one of equals)."""

    success: float = -1.0
    iteration: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, success: float, iteration: int, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Keep a copy of ``parameters`` when they are at least as good; says whether they were."""
        if success < self.success:
            return False
        self.success, self.iteration = success, iteration
        self.weights = {name: p.detach().clone() for name, p in parameters.items()}
        return True

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the kept weights back."""
        for name, parameter in parameters.items():
            parameter.copy_(self.weights[name])


class OnPolicyLoop:
    """``source`` -> ``learner`` -> ``store``, with validation seeds deciding which weights are kept.

    ``validate() -> Rate`` plays validation seeds; ``keep(iteration)`` saves the present weights as the best ones;
    ``prepare(progress)`` is called before every iteration with the share of the run that is behind, and
    ``report(iteration, metrics)`` after it.
    """

    def __init__(
        self,
        source: ExperienceSource,
        learner: OnPolicyLearner,
        store: PolicyStore,
        validate: Callable[[], Rate],
        config: LoopConfig,
        keep: Callable[[int], None] = lambda iteration: None,
        report: Callable[[int, dict[str, float]], None] = lambda iteration, metrics: None,
        prepare: Callable[[float], None] = lambda progress: None,
    ) -> None:
        self.source, self.learner, self.store, self.config = source, learner, store, config
        self.validate, self.keep, self.report, self.prepare = validate, keep, report, prepare
        self.best = Best()
        self.env_steps = 0.0

    def run(self) -> Best:
        """Train; the learner's parameters end as the best validated ones."""
        self.report(0, {**self._select(0), "env_steps_total": 0.0})
        for iteration in range(1, self.config.iterations + 1):
            self.prepare((iteration - 1) / self.config.iterations)
            metrics = self._iterate()
            if iteration % self.config.validate_every == 0 or iteration == self.config.iterations:
                metrics |= self._select(iteration)
            self.report(iteration, metrics)
        self.best.restore(self.learner.parameters)
        self.store.publish(self.learner.parameters)
        return self.best

    def _iterate(self) -> dict[str, float]:
        rollout = self.source.next()
        start = time.perf_counter()
        metrics = self.learner.update(rollout)
        metrics["learn_s"] = time.perf_counter() - start
        self.store.publish(self.learner.parameters)
        self.env_steps += rollout.info["env_steps"]
        return {**rollout.info, **metrics, "env_steps_total": self.env_steps}

    def _select(self, iteration: int) -> dict[str, float]:
        rate = self.validate()
        collapsed = rate.success < self.best.success - self.config.collapse
        if self.best.offer(rate.success, iteration, self.learner.parameters):
            self.keep(iteration)
        elif collapsed:
            self.best.restore(self.learner.parameters)
            self.store.publish(self.learner.parameters)
            self.learner.learning_rate *= self.config.collapse_rate
        return {
            "validation": rate.success,
            "validation_low": rate.low,
            "validation_high": rate.high,
            "collapsed": float(collapsed),
        }
