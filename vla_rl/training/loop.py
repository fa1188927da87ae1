"""The loop of every algorithm: collect, learn, publish; validate now and then; after a collapse go back to the best.

Between two iterations its whole state can be saved and put back: a run that goes on from there ends with the same
weights, bit for bit, as one that was never stopped (same machine, versions and number of threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, Learner, PolicyStore, Reducer, Resumable
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import LikelihoodPolicy


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and how to watch over it."""

    iterations: int = 110
    validate_every: int = 20
    save_every: int = 1  # iterations between two states on disk: so many are repeated at most after a kill
    collapse: float = 0.15  # a validation score this far below the best one sends the run back to the best weights
    collapse_lr_factor: float = 0.5  # and multiplies the learning rate
    collectors: int = 1  # threads that collect, each with its share of the environments
    rollouts_ahead: int = 0  # 1: collect the next rollout while learning from this one (experience/background.py)
    env_steps: int = 0  # low-level actions in all after which no further iteration is begun; 0: no limit
    validate_steps: int = 0  # validate also whenever so many low-level actions were taken since the last time; 0: never


class LoopLearner(Learner, Resumable, Protocol):
    """A learner whose weights the loop may keep, publish and put back, at a lower rate after a collapse."""

    parameters: dict[str, nn.Parameter]
    lr: float


class EvaluationResult(Protocol):
    """How good a policy is, with its interval: ``Rate`` of success, ``MeanReturn``."""

    @property
    def score(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    @property
    def episodes(self) -> int: ...


class AlgorithmConfig(Protocol):
    """The frozen dataclass of one algorithm's numbers, which knows its learner."""

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> LoopLearner:
        """A learner that improves ``policy`` (through ``parameters``) and ``critic`` in place.

        ``reducer`` joins it with those of other processes that learn from other rows of the same batch.
        """


@dataclass
class BestWeights:
    """The weights with the highest validation score so far (the later one of equals)."""

    score: float = -math.inf
    iteration: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, score: float, iteration: int, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Keep a copy of ``parameters`` when they are at least as good; says whether they were."""
        if score < self.score:
            return False
        self.score, self.iteration = score, iteration
        self.weights = {name: p.detach().clone() for name, p in parameters.items()}
        return True

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the kept weights back."""
        for name, parameter in parameters.items():
            parameter.copy_(self.weights[name])


class Loop:
    """``source`` -> ``learner`` -> ``store``, with validation seeds deciding which weights are kept.

    ``validate() -> EvaluationResult`` plays validation seeds; ``on_best(iteration)`` saves the present weights as best;
    ``prepare(progress)`` is called before every iteration with the share of the run that is behind and says whether the
    world has changed, so that the best weights must be judged anew; ``report(iteration, metrics)`` is called after it,
    and then ``save(iteration)``, which may ask for :meth:`state_dict`.
    """

    def __init__(
        self,
        source: ExperienceSource,
        learner: LoopLearner,
        store: PolicyStore,
        validate: Callable[[], EvaluationResult],
        config: LoopConfig,
        on_best: Callable[[int], None] = lambda iteration: None,
        report: Callable[[int, dict[str, float]], None] = lambda iteration, metrics: None,
        prepare: Callable[[float], bool] = lambda progress: False,
        save: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self.source, self.learner, self.store, self.config = source, learner, store, config
        self.validate, self.on_best, self.report, self.prepare, self.save = validate, on_best, report, prepare, save
        self.best = BestWeights()
        self.iteration = 0  # iterations that are done
        self.env_steps = 0.0
        self.validated_at = 0.0  # env_steps at the last validation

    def run(self) -> BestWeights:
        """Train what is left to do; the learner's parameters end as the best validated ones."""
        if not self.best.weights:
            self.report(0, {**self._validate(0), "env/steps_total": 0.0})
            self.save(0)
        while (progress := self.progress()) < 1:
            if self.prepare(progress):
                self._revalidate_best()
            metrics = self._iterate()
            self.iteration += 1
            if self._should_validate():
                metrics |= self._validate(self.iteration)
            self.report(self.iteration, metrics)
            self.save(self.iteration)
        self._restore_and_publish(self.best)
        return self.best

    def progress(self) -> float:
        """The share of the run that is behind: of its iterations, or of its actions if those run out first."""
        done = self.iteration / self.config.iterations if self.config.iterations else 1.0
        return max(done, self.env_steps / self.config.env_steps) if self.config.env_steps else done

    def _should_validate(self) -> bool:
        """Whether to validate now."""
        config, since = self.config, self.env_steps - self.validated_at
        often = self.iteration % config.validate_every == 0 or 0 < config.validate_steps <= since
        return often or self.progress() >= 1

    def state_dict(self) -> dict[str, Any]:
        """The state between two iterations; raises UserError when a part of the loop cannot say its own."""
        best = {"score": self.best.score, "iteration": self.best.iteration, "weights": self.best.weights}
        clocks = {"iteration": self.iteration, "env_steps": self.env_steps, "validated_at": self.validated_at}
        own = {**clocks, "best": best}
        return {**own, **{name: part.state_dict() for name, part in self._resumable_parts().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, with parts that were built as they were then."""
        self.iteration, self.env_steps = state["iteration"], state["env_steps"]
        self.validated_at = state["validated_at"]
        self.best = BestWeights(**state["best"])
        for name, part in self._resumable_parts().items():
            part.load_state_dict(state[name])

    def _resumable_parts(self) -> dict[str, Resumable]:
        parts: dict[str, Any] = {"learner": self.learner, "source": self.source, "store": self.store}
        for name, part in parts.items():
            if not isinstance(part, Resumable):
                raise UserError(
                    f"the {name} {type(part).__name__} cannot save its state, so this run could not be resumed; choose "
                    "another one, or run without saving states."
                )
        return parts

    def _iterate(self) -> dict[str, float]:
        rollout = self.source.next()
        start = time.perf_counter()
        metrics = self.learner.update(rollout)
        metrics["time/learn_s"] = time.perf_counter() - start
        self.store.publish(self.learner.parameters)
        self.env_steps += rollout.info["env/steps"]
        return {**rollout.info, **metrics, "env/steps_total": self.env_steps}

    def _revalidate_best(self) -> None:
        """Validate the best weights in the world as it is now, and go on with the present ones."""
        present = BestWeights()
        present.offer(0.0, self.iteration, self.learner.parameters)
        self._restore_and_publish(self.best)
        self.best.score = self.validate().score
        self._restore_and_publish(present)

    def _restore_and_publish(self, kept: BestWeights) -> None:
        kept.restore(self.learner.parameters)
        self.store.publish(self.learner.parameters)

    def _validate(self, iteration: int) -> dict[str, float]:
        found, self.validated_at = self.validate(), self.env_steps
        collapsed = found.score < self.best.score - self.config.collapse
        if self.best.offer(found.score, iteration, self.learner.parameters):
            self.on_best(iteration)
        elif collapsed:
            self._restore_and_publish(self.best)
            self.learner.lr *= self.config.collapse_lr_factor
        return {
            "eval/score": found.score,
            "eval/score_low": found.low,
            "eval/score_high": found.high,
            "eval/episodes": float(found.episodes),
            "eval/collapsed": float(collapsed),
        }
