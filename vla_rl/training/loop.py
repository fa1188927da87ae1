"""The training loop: collect, learn, publish, validate; after a collapse it returns to the best weights.

Its whole state can be saved between two iterations: a run resumed from it ends with the same weights, bit for bit, as
an undisturbed one (same machine, versions and number of threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, Learner, Reducer, Resumable
from vla_rl.contract.config import Checked, at_least
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import LikelihoodPolicy, set_progress
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.driver import now
from vla_rl.training.out_of_memory import COLLECT, LEARN, VALIDATE, phase_of_memory
from vla_rl.training.timeline import Timeline

COLLAPSE_LR_FACTOR = 0.5  # of the learning rate after a collapse


@dataclass(frozen=True)
class LoopConfig(Checked):
    """Length of training, validation and saved states.  Raises UserError for numbers without a meaning."""

    iterations: int = at_least(110, 0)
    validate_every: int = at_least(20, 0)  # iterations; 0: validate only before the first and after the last one
    save_every: int = at_least(1, 1)  # iterations between two states on disk; a killed run repeats at most this many
    collapse: float = at_least(0.15, 0)  # a score so far below the best one restores the best weights, and halves lr
    collectors: int = at_least(1, 1)  # processes that collect (1: this one), each with its share of the environments
    staleness: int = at_least(0, 0)  # most updates that collectors are ahead (experience/sources.py); 0: in step
    env_steps: int = at_least(0, 0)  # stop after this many low-level actions in all; 0: no limit
    validate_steps: int = at_least(0, 0)  # also validate after so many low-level actions since the last time; 0: never


class LoopLearner(Learner, Resumable, Protocol):
    """A learner whose weights the loop publishes and may restore, with a lower learning rate after a collapse.

    One that restores more than its weights then (critics, targets, optimizers) has ``best_state() -> dict``, a copy of
    all that, nested dicts of tensors and JSON values; and ``roll_back(state, lr_factor)``, which restores it.
    """

    parameters: dict[str, nn.Parameter]
    lr: float


class AlgorithmConfig(Protocol):
    """The frozen dataclass with the numbers of one algorithm, which builds its learner."""

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> LoopLearner:
        """A learner that improves ``policy`` (through ``parameters``) and ``critic`` in place.

        ``reducer`` joins it with the processes that learn from the other environments of the same batch.
        """


class Hook:
    """What a run does besides, such as training the world model in which it learns; this one does nothing."""

    def before_iteration(self, iteration: int) -> bool:
        """Called when so many iterations are complete; returns whether the environment has changed."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """See ``Resumable``; it is restored before the source is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class BestWeights:
    """The weights with the highest validation score so far (the later ones of equal scores)."""

    score: float = -math.inf
    iteration: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)  # see ``LoopLearner``

    def offer(self, score: float, iteration: int, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Keep a copy of ``parameters`` if their score is at least as high; returns whether it is."""
        if score < self.score:
            return False
        self.score, self.iteration = score, iteration
        self.weights = {name: p.detach().clone() for name, p in parameters.items()}
        return True

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the kept weights into ``parameters``."""
        for name, parameter in parameters.items():
            parameter.copy_(self.weights[name])


class Loop:
    """``source`` -> ``learner`` -> ``store``; validation decides which weights are kept.

    ``validate()`` plays validation seeds; without it (None) the last weights are kept.
    ``on_best(iteration)`` saves the present weights as the best ones.  ``report(iteration, metrics)`` is called after
    every iteration, then ``save(iteration)``, which may call :meth:`state_dict`.  ``timeline`` collects what takes
    the time.

    Out of memory is an OutOfMemoryError that names the phase (``out_of_memory.py``).
    The share of the run that is done is published with the weights, for policies whose exploration changes with it.
    When ``hook`` has changed the environment, the best weights are validated in it again.
    """

    def __init__(
        self,
        source: ExperienceSource,
        learner: LoopLearner,
        store: PolicyStore,
        validate: Callable[[], Rate | MeanReturn] | None,
        config: LoopConfig,
        on_best: Callable[[int], None] = lambda iteration: None,
        report: Callable[[int, dict[str, float]], None] = lambda iteration, metrics: None,
        save: Callable[[int], None] = lambda iteration: None,
        timeline: Timeline | None = None,
        hook: Hook | None = None,
    ) -> None:
        self.source, self.learner, self.store, self.config = source, learner, store, config
        self.validate, self.on_best, self.report, self.save = validate, on_best, report, save
        self.timeline, self.hook = timeline or Timeline(), hook or Hook()
        self.best = BestWeights()
        self.iteration = 0  # completed iterations
        self.env_steps = 0.0
        self.validated_at = 0.0  # env_steps at the last validation

    def run(self) -> BestWeights:
        """Run the remaining iterations; the learner's parameters end as the best validated ones."""
        if self.iteration == 0 and not self.best.weights:
            self.timeline.begin(0)
            self._record({**self._validate(), "env/steps_total": 0.0})
        while self.progress() < 1:
            start = time.perf_counter()
            self.timeline.begin(self.iteration + 1)
            if self.hook.before_iteration(self.iteration):
                self._revalidate_best()
            metrics = self._iterate()
            if self._should_validate():
                metrics |= self._validate()
            metrics["time/iteration_s"] = time.perf_counter() - start
            self._record(metrics)
        if self.validate is None:
            self.best.offer(-math.inf, self.iteration, self.learner.parameters)
            self.on_best(self.iteration)
        self._restore_and_publish(self.best)
        return self.best

    def _record(self, metrics: dict[str, float]) -> None:
        with self.timeline.span("saving"):
            self.report(self.iteration, metrics)
            self.save(self.iteration)

    def progress(self) -> float:
        """The share of the run that is done: of its iterations, or of its actions if those are used up first."""
        done = self.iteration / self.config.iterations if self.config.iterations else 1.0
        if self.config.env_steps:
            done = max(done, self.env_steps / self.config.env_steps)
        return min(done, 1.0)  # the last iteration may take more actions than are left

    def _should_validate(self) -> bool:
        config, since = self.config, self.env_steps - self.validated_at
        by_iteration = config.validate_every > 0 and self.iteration % config.validate_every == 0
        return by_iteration or 0 < config.validate_steps <= since or self.progress() >= 1

    def not_resumable(self) -> str:
        """One sentence that names a part without a state to save, "" when the run can be resumed."""
        for name, part in self._parts().items():
            if not isinstance(part, Resumable):
                return (
                    f"the {name} {type(part).__name__} cannot save its state, so this run cannot be resumed and no "
                    "state of it is saved; to resume runs, give it state_dict and load_state_dict."
                )
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The state between two iterations; raises UserError with :meth:`not_resumable`."""
        if reason := self.not_resumable():
            raise UserError(reason)
        counters = {"iteration": self.iteration, "env_steps": self.env_steps, "validated_at": self.validated_at}
        return {
            **counters,
            "best": dict(vars(self.best)),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned, with parts that were built from the same config."""
        self.iteration, self.env_steps = state["iteration"], state["env_steps"]
        self.validated_at = state["validated_at"]
        self.best = BestWeights(**state["best"])
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"learner": self.learner, "hook": self.hook, "source": self.source, "store": self.store}

    def _iterate(self) -> dict[str, float]:
        asked = now()
        with phase_of_memory(COLLECT):
            rollout = self.source.next()
        self.timeline.collected(rollout.spans, asked)
        start = time.perf_counter()
        with phase_of_memory(LEARN), self.timeline.span("learning"):
            metrics = self.learner.update(rollout)
        metrics["time/learn_s"] = time.perf_counter() - start
        self.iteration += 1
        self.env_steps += rollout.info["env/steps"]
        self._publish()
        return {**rollout.info, **metrics, "env/steps_total": self.env_steps}

    def _publish(self) -> None:
        with self.timeline.span("syncing"):
            self.store.publish(self.learner.parameters, self.progress())

    def _revalidate_best(self) -> None:
        """Score the best weights in the renewed environment, and continue with the present ones."""
        if self.validate is None:
            return
        present = BestWeights()
        present.offer(0.0, self.iteration, self.learner.parameters)
        self._restore_and_publish(self.best)
        with phase_of_memory(VALIDATE), self.timeline.span("validating"):
            self.best.score = self.validate().score
        self._restore_and_publish(present)

    def _restore_and_publish(self, kept: BestWeights) -> None:
        kept.restore(self.learner.parameters)
        self._publish()

    def _roll_back(self) -> None:
        """Return to the best weights, with a lower learning rate and without what led away from them."""
        if self.best.learner:
            learner: Any = self.learner
            learner.roll_back(self.best.learner, COLLAPSE_LR_FACTOR)
            self._publish()
            return
        self._restore_and_publish(self.best)
        self.learner.lr *= COLLAPSE_LR_FACTOR

    def _validate(self) -> dict[str, float]:
        if self.validate is None:
            return {}
        start = time.perf_counter()
        with phase_of_memory(VALIDATE), self.timeline.span("validating"):
            found, self.validated_at = self.validate(), self.env_steps
        seconds = time.perf_counter() - start
        collapsed = found.score < self.best.score - self.config.collapse
        if self.best.offer(found.score, self.iteration, self.learner.parameters):
            if hasattr(self.learner, "best_state"):
                self.best.learner = self.learner.best_state()
            with self.timeline.span("saving"):
                self.on_best(self.iteration)
        elif collapsed:
            self._roll_back()
        return {
            "eval/score": found.score,
            "eval/score_low": math.nan if found.low is None else found.low,
            "eval/score_high": math.nan if found.high is None else found.high,
            "eval/episodes": float(found.episodes),
            "eval/collapsed": float(collapsed),
            "time/validate_s": seconds,
        }


class PolicyStore:
    """Holds the newest weights for those who act.

    Actor and learner hold the same module, so :meth:`publish` changes only its version and its progress.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.progress = policy, 0.0
        self._apply()

    def publish(self, weights: Mapping[str, Tensor], progress: float = 0.0) -> int:
        self.policy.version += 1
        self.progress = progress
        self._apply()
        return int(self.policy.version)

    def state_dict(self) -> dict[str, Any]:
        """Version and progress; the weights are the learner's."""
        return {"version": int(self.policy.version), "progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.version, self.progress = state["version"], state["progress"]
        self._apply()

    def _apply(self) -> None:
        set_progress(self.policy, self.progress)
