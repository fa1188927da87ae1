"""The stages between nothing and a good policy; the demo, the study and ``vla-rl train`` are made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from vla_rl.contract.check import check_policy_quickly, is_user_defined
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.pretrained import save_own
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.evaluators import Evaluator, SharedEnvs, new_evaluator
from vla_rl.recipes.memory_knobs import naming_knobs
from vla_rl.recipes.progress import Clock, bar, console, mostly, steps_per_second
from vla_rl.recipes.signals import Terminated, patient_sigterm
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.recipes.training_setup import TrainingSetup, build
from vla_rl.training.distributed import anyone, barrier
from vla_rl.training.loop import BestWeights, Loop
from vla_rl.training.out_of_memory import BUILD, LEARN, phase_of_memory
from vla_rl.training.timeline import Timeline
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class EvaluationConfig:
    """How many held-out episodes, and how many are played side by side."""

    validation: int = 256
    test: int = 512
    ablation: int = 256  # validation seeds for each check of what the policy looks at
    num_envs: int = 64
    processes: int = 1  # that share the environments; 1: this one
    share_env: bool = False  # validate in the training's environments, which saves the memory of a second set

    def __post_init__(self) -> None:
        """Raises UserError for counts with which nothing would be played, and for shared ones in other processes."""
        if self.share_env and self.processes > 1:
            raise UserError(
                f"{self.processes} processes cannot evaluate in the training's environments, which are in one, so "
                "share_env would change nothing; set evaluation.processes to 1."
            )
        positive, episodes = (1, math.inf), (1, seed_ranges.MOST)
        check_limits(self, validation=episodes, test=episodes, ablation=episodes)
        check_limits(self, num_envs=positive, processes=positive)

    def evaluator(self, env: EnvFactory) -> Evaluator:
        """Plays seeds in ``env``."""
        return new_evaluator(env, self.num_envs, self.processes)


@runtime_checkable
class LongUpdate(Protocol):
    """A learner whose single update may take minutes, and reports which share of it is done."""

    report: Callable[[float], None]


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a block to ``seconds[name]``."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def collect(env_config: EnvConfig, count: int, seed: int, num_envs: int = 64) -> Demonstrations:
    """``count`` successful demonstrations of the scripted expert."""
    env, expert = env_config.make(min(num_envs, count)), env_config.make_expert()
    seeds = list(seed_ranges.training_seeds(seed, "demonstrations")[:count])
    with bar("collect", count) as update:
        episodes = collect_demonstrations(env, expert.act, seeds, lambda done: update(done, "demonstrations"))
    env.close()
    return episodes


def play(
    env_config: EnvFactory, policy: Policy, seeds: list[int], config: EvaluationConfig, seed: int, what: str
) -> Outcomes:
    """Evaluate on ``seeds`` with a progress bar."""
    with bar(what, len(seeds)) as update, closing(config.evaluator(env_config)) as evaluator:
        return evaluator.evaluate(policy, seeds, seed, lambda done, good: update(done, f"success {good / done:.0%}"))


def improve(
    trainer: TrainerConfig, context: RunContext, evaluation: EvaluationConfig, folder: RunFolder
) -> tuple[Trainable, BestWeights]:
    """Reinforcement learning by ``trainer``; the policy ends with its best validated weights.

    Those are saved as the checkpoint "best" whenever they improve.  The state of the run is saved after every
    ``save_every`` iterations and when the process is asked to terminate; a resumed run goes on from it.
    Raises UserError when memory runs out, with what to change.
    """

    def check(policy: Trainable) -> None:
        if is_user_defined(policy):
            with closing(context.env.make(2)) as env:
                check_policy_quickly(policy, env, generator(context.seed, 0))

    def checked_setup() -> TrainingSetup:
        with phase_of_memory(BUILD):
            return build(trainer, context, check)

    shared = SharedEnvs(context.env) if evaluation.share_env else None
    context = replace(context, env=shared or context.env)
    with (
        naming_knobs(trainer, evaluation, context.base),
        closing(shared or evaluation.evaluator(context.env)) as validation,
        closing(checked_setup()) as setup,
    ):
        if shared:
            shared.lend(setup.source)
        return _train(trainer, context, evaluation, folder, validation, setup)


def _train(
    trainer: TrainerConfig,
    context: RunContext,
    evaluation: EvaluationConfig,
    folder: RunFolder,
    validation: Evaluator,
    setup: TrainingSetup,
) -> tuple[Trainable, BestWeights]:
    group, seed = context.group, context.seed
    policy, held_out = setup.policy, seed_ranges.held_out(seed_ranges.VALIDATION, evaluation.validation)
    by_family: dict[str, float] = {}
    spent = Clock()
    timeline = Timeline.of(folder)
    saved = folder.load_state("rl") if folder.resumed else None
    with phase_of_memory(LEARN):
        pretrained = saved is None and trainer.pretrain(setup.learner)

    def validate() -> Rate | MeanReturn:
        outcomes = validation.evaluate(policy, held_out, seed)
        barrier(group)  # a checkpoint may follow, which gathers weights that processes share
        if len(outcomes.families) > 1:
            by_family.update({f"eval/{name}": rate.success for name, rate in outcomes.families.items()})
        return outcomes.score

    with bar("improve", trainer.loop.iterations) as update, patient_sigterm() as asked_to_stop:

        def save(iteration: int) -> None:
            stopping = anyone(asked_to_stop, group)
            if can_resume and (stopping or iteration % trainer.loop.save_every == 0):
                folder.save_state(iteration, loop.state_dict())
            if stopping:
                raise Terminated

        loop = Loop(
            setup.source,
            setup.learner,
            setup.store,
            validate,
            trainer.loop,
            on_best=lambda iteration: save_own(policy, folder.checkpoint("best")),
            report=_report_rl(folder, update, by_family, spent, timeline),
            save=save,
            timeline=timeline,
        )
        if isinstance(setup.learner, LongUpdate):
            setup.learner.report = lambda share: update(loop.iteration, f"learning from successes, {share:.0%}")
        if reason := loop.not_resumable():
            console.print(reason)
        can_resume = not reason
        if saved is not None:
            loop.load_state_dict(saved)
        elif pretrained and can_resume:
            folder.save_state(-1, loop.state_dict())  # before iteration 0, which validates for the first time
        try:
            best = loop.run()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} The last good weights are in {str(folder.checkpoint('best'))!r}.") from error
        finally:
            timeline.write(folder)
    spent.tell()
    return policy, best


def _score(value: float) -> str:
    """A rate of success as a percentage, and a mean return, which is hardly ever within 0 and 1, as it is."""
    return f"{value:.0%}" if 0 <= value <= 1 else f"{value:.4g}"


def _report_rl(
    folder: RunFolder,
    update: Callable[[int, str], None],
    by_family: dict[str, float],
    spent: Clock,
    timeline: Timeline,
) -> Callable[[int, dict[str, float]], None]:
    """Metrics to the folder, those of a validation with its rates ``by_family``; a short remark to the progress bar.

    ``spent`` counts the time; the ``timeline`` is written anew after a validation.
    """
    best = {"eval/score": 0.0}

    def report(iteration: int, metrics: dict[str, float]) -> None:
        metrics |= by_family if "eval/score" in metrics else {}
        folder.log("rl", iteration, metrics)
        if "eval/score" in metrics:
            timeline.write(folder)
        best["eval/score"] = metrics.get("eval/score", best["eval/score"])
        spent.add(metrics)
        trying = metrics.get("rollout/successes", 0.0) / max(1.0, metrics.get("rollout/episodes", 0.0))
        speed = steps_per_second(metrics)
        update(
            iteration,
            f"exploring {trying:.0%}, validated {_score(best['eval/score'])}, {speed:.0f} steps/s, {mostly(metrics)}",
        )
        if metrics.get("eval/collapsed"):
            console.print(f"iteration {iteration}: validation collapsed, went back to the best weights.")
        if metrics.get("policy/returned"):
            base = metrics["rollout/base_success"]
            console.print(f"iteration {iteration}: exploring succeeds less often than the base ({base:.0%}), returned.")

    return report
