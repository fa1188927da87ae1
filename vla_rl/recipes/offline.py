"""Reinforcement learning from a recorded dataset alone: RECAP, and imitation weighed by advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import demonstrated, normalized
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.algorithms.recorded import (
    CrossFitted,
    Measure,
    Recorded,
    RecordedConfig,
    RecordedRecap,
    WeightedConfig,
    WeightedImitation,
    measure,
)
from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import Checked, JsonObject, at_least
from vla_rl.contract.errors import Terminated, UserError
from vla_rl.contract.policy import require
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import percent
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.relabel import INTERVENTION
from vla_rl.policies.advantage_conditioned import advantage_conditioned
from vla_rl.policies.history import with_history
from vla_rl.pretrained import save_own
from vla_rl.recipes.evaluators import EvaluationConfig, play
from vla_rl.recipes.imitate import OnStep, progress
from vla_rl.recipes.imitate_dataset import FromDataset
from vla_rl.recipes.terminal import bar, clock, console, patient_sigterm
from vla_rl.recipes.trainers import generator
from vla_rl.training.fit import FitConfig, lr_factor
from vla_rl.training.loop import Hook, Loop, LoopConfig, PolicyStore
from vla_rl.training.tracking import START, RunFolder

_READ = "value/"  # before the names of what the value reads, which the policy need not
_FOLDS = 5
_FEW = 20  # episodes of a kind, below which it can hardly be learnt what they have in common
_BLOCK = 50  # gradient steps between two saved states
_SPREAD = 3.0  # std of the vectors for "bad" and "not said", beside conditions of about 1


@dataclass(frozen=True)
class ByAdvantage(Checked):
    """RECAP: imitate everything, conditioned on how good it was, and act as if the next decision were good."""

    algorithm: RecordedConfig = field(
        default_factory=lambda: RecordedConfig(lookahead=2, value_steps=1500, steps=2500, lr=1e-3)
    )
    guidance: float = at_least(1.0, 0)  # see AdvantageConfig; above 1 for flows only
    stage = "recap"

    def policy(self, base: Any) -> Any:
        """What is trained, on ``base``; raises UserError for a policy that cannot be conditioned on an indicator."""
        return advantage_conditioned(base, self.guidance, _SPREAD)

    def learner(self, policy: Any, value: CrossFitted, recorded: Recorded, seed: int) -> RecordedRecap:
        return RecordedRecap(*self._given(policy, value, seed), recorded=recorded, block=_BLOCK)

    def _given(self, policy: Any, value: CrossFitted, seed: int) -> tuple[Any, ...]:
        ahead = replace(self.algorithm, lookahead=self.algorithm.lookahead * policy.horizon)
        return policy, policy.trainable(), value, policy.spec.time_limit, ahead, generator(seed, 4)


@dataclass(frozen=True)
class ByWeight(ByAdvantage):
    """Advantage-weighted imitation: decisions are imitated as often as they were good, by any policy that imitates."""

    algorithm: WeightedConfig = field(
        default_factory=lambda: WeightedConfig(lookahead=2, value_steps=1500, steps=2500, lr=1e-3)
    )
    stage = "weighted"

    def policy(self, base: Any) -> Any:
        return base

    def learner(self, policy: Any, value: CrossFitted, recorded: Recorded, seed: int) -> RecordedRecap:
        return WeightedImitation(*self._given(policy, value, seed), recorded=recorded, block=_BLOCK)


@dataclass(frozen=True)
class LearnOffline(FromDataset):
    """Learn from recorded episodes, failures too: measure whether they can teach, value, fine-tune: checkpoint "best".

    ``policy``, which one begins with, imitates; perception that is frozen stays as it is.  With ``env``, validation
    seeds choose the best weights and test seeds are played in the end; without, the last weights are kept.
    """

    method: ByAdvantage = field(default_factory=ByAdvantage)
    validate_every: int = at_least(1000, 0)  # gradient steps; 0: before the first and after the last one
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def run(self, folder: RunFolder) -> JsonObject:
        if not self.policy:
            raise UserError(
                "no policy was named that could learn from failures as well; imitate the dataset first "
                "(imitate.py:from_dataset --only-successes), or name a checkpoint with --policy."
            )
        seconds: dict[str, float] = {}
        with clock(seconds, "read"):
            policy, learner = self._prepared(folder)
        saved = folder.load_state(self.method.stage) if folder.resumed else None
        found: JsonObject = saved["measure"] if saved else {}
        if saved is None:
            with clock(seconds, "value"):
                found = asdict(self._measured(learner, folder))
        with clock(seconds, self.method.stage):
            best = self._improved(policy, learner, folder, saved, found)
        summary: JsonObject = {"measure": found, "best_step": best * _BLOCK, "seconds": seconds, "seed": self.seed}
        if not self.env.name:
            console.print("no environment was named (--env), so nothing was played: the last weights were kept.")
            return summary
        with clock(seconds, "evaluation"):
            tests = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
            outcomes = play(self.env, policy, tests, self.evaluation, self.seed, "test")
        families = {name: asdict(rate) for name, rate in outcomes.families.items()}
        return {"rl": asdict(outcomes.rate), "families": families, **summary}

    def _prepared(self, folder: RunFolder) -> tuple[Any, RecordedRecap]:
        """The policy to train and its learner, with all that is recorded; what is begun with is kept as "start"."""
        episodes, kept = self.read(), folder.checkpoint(START)
        success = episodes.successes()
        _print_outcomes(episodes, success)
        base, episodes = self.start(episodes, str(kept) if kept.exists() else "")
        if not kept.exists():
            save_own(base, kept)
        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        policy = self.method.policy(base)
        value = CrossFitted(_sizes(policy), _FOLDS).to(next(iter(policy.trainable().values())).device)
        recorded = recorded_decisions(policy, episodes, success, self.method.algorithm)
        return policy, self.method.learner(policy, value, recorded, self.seed)

    def _measured(self, learner: RecordedRecap, folder: RunFolder) -> Measure:
        """Fit the value, and say whether the data can teach."""
        steps = learner.config.value_steps
        with progress("value", steps, "loss {value/loss:.3f}") as report:
            learner.fit_value(_logged(folder, report))
        with progress("measure", steps, "loss {value/loss:.3f}") as report:
            found = measure(learner, _sizes(learner.policy), generator(self.seed, 6), report)
        gain, low, high = found.by_action
        console.print(
            f"in episodes that it has not seen, the value explains {found.by_value:.0%} of the variance of returns "
            f"({found.by_clock:.0%}: task and clock alone), and what was done {gain:+.1%} [{low:+.1%}, {high:+.1%}] "
            f"more; in like situations actions vary by {found.coverage:.0%} of their variance in all"
        )
        for warning in found.warnings():
            console.print(f"  {warning}")
        return found

    def _improved(self, policy: Any, learner: RecordedRecap, folder: RunFolder, saved: Any, found: JsonObject) -> int:
        """Train, and leave ``policy`` at its best weights; returns after how many blocks those were."""
        blocks = math.ceil(learner.config.steps / _BLOCK)
        config = LoopConfig(blocks, math.ceil(self.validate_every / _BLOCK), collapse=math.inf)
        stage, last = self.method.stage, [math.nan]
        with bar(stage, blocks * _BLOCK) as update, patient_sigterm() as asked_to_stop, self._evaluated() as validate:

            def report(iteration: int, metrics: dict[str, float]) -> None:
                folder.log(stage, iteration, metrics)
                last[0] = metrics.get("eval/score", last[0])
                score = "" if math.isnan(last[0]) else f", validated {last[0]:.0%}"
                update(iteration * _BLOCK, f"loss {metrics.get('policy/loss', math.nan):.4f}{score}")

            def save(iteration: int) -> None:
                folder.save_state(iteration, {**loop.state_dict(), "measure": found})
                if asked_to_stop():
                    raise Terminated

            loop = Loop(
                _NothingNew(),
                learner,
                PolicyStore(policy),
                (lambda: validate(policy)) if self.env.name else None,
                config,
                on_best=lambda iteration: save_own(policy, folder.checkpoint("best")),
                report=report,
                save=save,
                hook=_Schedule(learner, blocks),
            )
            if saved is not None:
                loop.load_state_dict(saved)
            return loop.run().iteration

    @contextmanager
    def _evaluated(self) -> Iterator[Callable[[Any], Rate | MeanReturn]]:
        """What plays the validation seeds, for a block; nobody calls it where there is no environment."""
        if not self.env.name:
            yield lambda policy: MeanReturn(math.nan, None, None, 0)
            return
        with closing(self.evaluation.evaluator(self.env)) as evaluator:
            seeds = seed_ranges.held_out(seed_ranges.VALIDATION, self.evaluation.validation)
            yield lambda policy: evaluator.evaluate(policy, seeds, self.seed).score


class _NothingNew:
    """A source of experience where all of it is recorded."""

    def next(self) -> Rollout:
        nothing = dict.fromkeys((item.name for item in fields(Rollout)), np.zeros(0))
        return Rollout(**{**nothing, "info": {"env/steps": 0.0}, "task": None, "robot": "", "stream": "", "spans": {}})  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Schedule(Hook):
    """The learning rate of imitation: warm-up, then a cosine down to zero."""

    def __init__(self, learner: RecordedRecap, blocks: int) -> None:
        self.learner, self.fit = learner, FitConfig(steps=blocks * _BLOCK)

    def before_iteration(self, iteration: int) -> bool:
        self.learner.lr = self.learner.config.lr * lr_factor(iteration * _BLOCK + _BLOCK // 2, self.fit)
        return False


def _logged(folder: RunFolder, report: OnStep) -> OnStep:
    """``report``, and the metrics of every 25th step to ``folder`` as those of the stage "value"."""

    def both(step: int, metrics: dict[str, float]) -> None:
        report(step, metrics)
        if (step + 1) % 25 == 0:
            folder.log("value", step, metrics)

    return both


def _sizes(policy: Any) -> dict[str, int]:
    """What the value reads; raises UserError for a policy that does not say what a critic can read."""
    require(policy, "a value of recorded observations", ("feature_sizes", "encode"), "so none can be learnt; add them.")
    return {_READ + name: size for name, size in {**policy.feature_sizes, "time": 1}.items()}


def _print_outcomes(episodes: Demonstrations, success: np.ndarray) -> None:
    """Print how the episodes ended; raises UserError where none succeeded."""
    count, tasks = len(success), episodes.task[[begin for begin, _ in episodes.spans()]]
    if not success.any():
        raise UserError(
            f"none of the {count} episodes succeeded, so nothing says what good decisions are; add episodes that did, "
            "such as demonstrations."
        )
    console.print(
        f"{count} episodes of {len(set(tasks.tolist()))} tasks, {len(episodes.state)} control steps: success "
        f"{percent(Rate.of(success))}, {int((~success).sum())} failures"
    )
    if min(success.sum(), (~success).sum()) < _FEW:
        console.print(
            f"  only {int(success.sum())} episodes succeeded and {int((~success).sum())} failed, so what tells them "
            "apart can hardly be learnt; record more of both kinds."
        )
    ends = {episodes.tasks[task]: set(success[tasks == task].tolist()) for task in np.unique(tasks)}
    for ended, then in ((False, "failed: nothing of it is called good"), (True, "succeeded: only their lengths teach")):
        alike = [task for task, found in ends.items() if found == {ended}]
        if alike and len(ends) > 1:
            console.print(f"  all episodes of {', '.join(map(repr, alike))} {then}.")


def recorded_decisions(policy: Any, episodes: Demonstrations, success: np.ndarray, config: RecapConfig) -> Recorded:
    """A decision at every control step of ``episodes``, on the host, with what ``policy`` and value read."""
    length, spans = getattr(policy, "chunk_length", policy.horizon), episodes.spans()
    actions, counts = (torch.as_tensor(item) for item in episodes.chunks(length))
    task, episode = torch.as_tensor(episodes.task), torch.as_tensor(episodes.episode)
    features = _features(policy, episodes)
    chunks = demonstrated(features, normalized(policy, features, actions), counts, task)
    flags = np.asarray(episodes.extras.get(INTERVENTION, np.zeros(len(episode)))).reshape(-1).astype(bool)
    ends = np.array([end for _, end in spans])[episodes.episode]
    ahead = np.arange(len(flags))[:, None] + np.arange(length)
    person = torch.as_tensor(flags[np.minimum(ahead, ends[:, None] - 1)])
    limit = int(policy.spec.time_limit)
    return Recorded.of(chunks, episode, torch.as_tensor(success), person, limit, config, _FOLDS)


def _features(policy: Any, episodes: Demonstrations, part: int = 64) -> dict[str, Tensor]:
    """What the policy reads when it imitates, and under names of their own what the value reads, {name: [N,...]}.

    A policy that imitates by other features than it decides by gives those; of its decisions' the others are dropped.
    """
    obs, own = episodes.observation(), hasattr(policy, "imitation_features")
    read, parts = [*policy.feature_sizes, "time"], []
    for first in range(0, len(episodes.state), part):
        found = policy.encode(obs.select(slice(first, first + part)))
        parts.append({name: item.cpu() for name, item in found.items() if name in read or not own})
    encoded = with_history(policy, {name: torch.cat([item[name] for item in parts]) for name in parts[0]}, obs.time)
    imitated = policy.imitation_features(obs) if own else encoded
    return {**imitated, **{_READ + name: encoded[name] for name in read}}
