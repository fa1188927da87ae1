"""The parts of one training run, built from its config."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from vla_rl.contract.batch import ExperienceSource, OneProcess
from vla_rl.contract.config import JsonObject, from_json, to_json
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.experience.asynchronous import Advancing, AdvancingSource, AsyncSource
from vla_rl.experience.background import BackgroundSource, CollectingSource
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.worker import Worker
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.context import RunContext, Trainable, placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import remote_env, saved
from vla_rl.recipes.progress import console
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.recipes.workers import workers
from vla_rl.training.distributed import SummedCounters
from vla_rl.training.loop import LoopLearner
from vla_rl.training.policy_store import InProcessPolicyStore


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of one training run; ``close()`` ends its environments and those who collect in them."""

    policy: Trainable
    env: VecEnv
    source: ExperienceSource
    learner: LoopLearner
    store: InProcessPolicyStore
    close: Callable[[], None]


def build(
    trainer: TrainerConfig, context: RunContext, check: Callable[[Trainable], None] = lambda policy: None
) -> TrainingSetup:
    """All parts of a run; its sources are in processes of their own if there are several.

    ``check`` may refuse the policy before anything is built around it.
    """
    loop, shares = trainer.loop, context.split(trainer.loop.collectors)
    policy = trainer.build_policy(context.for_policy())
    check(policy)
    context.share(policy, loop)
    env = trainer.build_env(shares[0])  # for its spec alone, where other processes collect
    learner = trainer.build_learner(context, env, policy)
    store = InProcessPolicyStore(policy)
    source, close = _source(trainer, shares, env, policy, store)
    summed = source if context.group.size == 1 else SummedCounters(source, context.group)
    return TrainingSetup(policy, env, trainer.whole_source(summed, policy), learner, store, close)


def _source(
    trainer: TrainerConfig, shares: list[RunContext], env: VecEnv, policy: Trainable, store: InProcessPolicyStore
) -> tuple[ExperienceSource, Callable[[], None]]:
    """The experience of all ``shares``, in step with the learner or ahead of it, and what ends it."""
    loop, remake = trainer.loop, None
    with ExitStack() as stack:
        if loop.collectors == 1:
            sources: list[CollectingSource] = [trainer.build_source(shares[0], env, policy)]
        else:
            remote = stack.enter_context(closing(ProcessSources(trainer, shares, lambda: store.progress)))
            sources, remake = [*remote.all()], remote.remake
        whole: AsyncSource | BackgroundSource
        if loop.staleness:
            advancing, windows = [_advancing(source) for source in sources], trainer.windows(len(sources))
            whole = stack.enter_context(closing(AsyncSource(advancing, policy, loop.staleness, windows, remake)))
        elif loop.collectors > 1:
            whole = stack.enter_context(closing(BackgroundSource(sources, policy)))
        else:
            return sources[0], env.close
        return whole, stack.pop_all().close


def _advancing(source: CollectingSource) -> AdvancingSource:
    """``source``; raises UserError unless it can be given new weights between two decisions."""
    if not isinstance(source, Advancing):
        raise UserError(
            f"{type(source).__name__} has no advance and deliver, so it cannot play on while the policy changes; add "
            "them, or set staleness to 0."
        )
    return cast(AdvancingSource, source)


_MAKE = "vla_rl.recipes.training_setup:make_source"


class ProcessSources:
    """Makes the source of each of ``shares``, in a worker process of its own, and makes it again when that has died."""

    def __init__(self, trainer: TrainerConfig, shares: list[RunContext], progress: Callable[[], float]) -> None:
        """``progress`` as for ``ProcessSource``; raises UserError for what another process cannot make."""
        self._pool, self._progress, self._shares = workers(len(shares)), progress, shares
        first = shares[0]
        self._given = {
            "trainer": to_json(trainer),
            "env": remote_env(first.env),
            "seed": first.seed,
            "parts": first.parts,
            "demonstrations": first.demonstrations,
            "device": str(first.device),
        }
        self._files = ExitStack()
        self._base = "" if first.base is None else self._files.enter_context(saved(first.base))

    def all(self) -> list[ProcessSource]:
        """The sources, in the order of their shares."""
        return [self._made(i, worker) for i, worker in enumerate(self._pool.all[: len(self._shares)])]

    def remake(self, i: int) -> ProcessSource:
        """Source ``i`` in a new process."""
        return self._made(i, self._pool.replaced(i))

    def close(self) -> None:
        """Remove the files that the processes read; the processes are those of the whole run."""
        self._files.close()

    def _made(self, i: int, worker: Worker) -> ProcessSource:
        with (
            self._pool.engine.placed(worker, self._base) as base,
            self._pool.engine.placed(worker, self._pool.run) as run,
        ):
            given = {**self._given, "base": base, "run": run, "part": self._shares[i].part}
            return ProcessSource(_MAKE, given, worker, self._progress)


def make_source(
    trainer: JsonObject,
    env: JsonObject,
    base: str,
    seed: int,
    part: int,
    parts: int,
    demonstrations: str,
    device: str,
    run: str,
) -> CollectingSource:
    """The source of share ``part`` of ``parts``, in the process that collects it."""
    console.quiet = True  # progress bars are those of the process that learns
    if run:
        load_kept_files(Path(run))
    config: TrainerConfig = from_json(trainer)
    envs: EnvConfig = from_json(env)
    start = placed(load_policy(base), torch.device(device)) if base else None
    context = RunContext(envs, start, seed, OneProcess(), demonstrations, torch.device(device), part, parts)
    policy = config.build_policy(context)
    return config.build_source(context, config.build_env(context), policy)
