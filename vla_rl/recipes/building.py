"""The parts of one training run, built from its config."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vla_rl.contract.batch import ExperienceSource, OneProcess
from vla_rl.contract.config import JsonObject, from_json, to_json
from vla_rl.contract.env import VecEnv
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.sources import CollectingSource, Collectors
from vla_rl.experience.worker import Worker
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import remote_env, saved
from vla_rl.recipes.policies import check_if_foreign
from vla_rl.recipes.terminal import console
from vla_rl.recipes.trainers import CPU, RunContext, Trainable, TrainerConfig, placed
from vla_rl.recipes.workers import workers
from vla_rl.training.distributed import SummedCounters
from vla_rl.training.loop import LoopLearner, PolicyStore
from vla_rl.training.out_of_memory import BUILD, phase_of_memory
from vla_rl.training.sharding import ShardedGroup


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of one training run; ``close()`` ends its environments and those who collect in them."""

    policy: Trainable
    env: VecEnv
    source: ExperienceSource
    learner: LoopLearner
    store: PolicyStore
    close: Callable[[], None]


def build(trainer: TrainerConfig, context: RunContext) -> TrainingSetup:
    """All parts of a run.

    Several collectors are processes of their own, and so is one that plays ahead of weights that processes share: to
    act with shares, all of them would have to decide together.  Raises UserError for what cannot be built.
    """
    loop, shares = trainer.loop, context.split(trainer.loop.collectors)
    with phase_of_memory(BUILD), ExitStack() as stack:
        env = trainer.build_env(shares[0])  # for its spec alone, where other processes collect
        closing_env = stack.enter_context(ExitStack())
        closing_env.callback(env.close)
        policy = trainer.build_policy(replace(context, device=CPU) if context.sharded else context, env)
        check_if_foreign(policy, context.env, context.seed)
        remote = None
        if loop.collectors > 1 or (context.sharded and loop.staleness):
            remote = stack.enter_context(closing(ProcessSources(trainer, shares)))  # it keeps the whole base
        if isinstance(context.group, ShardedGroup):
            context.group.shard(policy, context.device)
        learner = trainer.build_learner(context, env, policy)
        store = PolicyStore(policy)
        if remote is None:
            sources = [trainer.build_source(shares[0], env, policy)]
        else:
            sources = [*remote.all(lambda: store.progress)]
        source: ExperienceSource = sources[0]
        if remote is not None or loop.staleness:
            windows, remake = 1 if trainer.joins_episodes else None, None if remote is None else remote.remake
            source = stack.enter_context(closing(Collectors(sources, policy, loop.staleness, windows, remake)))
            if remote is None:
                closing_env.pop_all()  # the source closes it, in its thread
        whole = source if context.group.size == 1 else SummedCounters(source, context.group)
        return TrainingSetup(policy, env, whole, learner, store, stack.pop_all().close)


_MAKE = "vla_rl.recipes.building:make_source"


class ProcessSources:
    """Makes the source of each of ``shares``, in a worker process of its own, and makes it again when that has died."""

    def __init__(self, trainer: TrainerConfig, shares: list[RunContext]) -> None:
        """Raises UserError for what another process cannot make."""
        self._pool, self._shares = workers(len(shares)), shares
        self._progress: Callable[[], float] = lambda: 0.0
        first = shares[0]
        self._given = {
            "trainer": to_json(trainer),
            "env": remote_env(first.env),
            "seed": first.seed,
            "parts": first.parts,
            "demonstrations": first.demonstrations,
            "device": str(first.device),
            "reward": to_json(first.reward),
        }
        self._files = ExitStack()
        self._base = "" if first.base is None else self._files.enter_context(saved(first.base))

    def all(self, progress: Callable[[], float]) -> list[ProcessSource]:
        self._progress = progress
        return [self._made(i, worker) for i, worker in enumerate(self._pool.all[: len(self._shares)])]

    def remake(self, i: int) -> ProcessSource:
        return self._made(i, self._pool.replaced(i))

    def close(self) -> None:
        """Remove the files that the processes read; the processes are those of the whole run."""
        self._files.close()

    def _made(self, i: int, worker: Worker) -> ProcessSource:
        with (
            self._pool.engine.placed(worker, self._base) as base,
            self._pool.engine.placed(worker, self._pool.run) as run,
        ):
            given = {"share": self._given, "base": base, "run": run, "part": self._shares[i].part}
            return ProcessSource(_MAKE, given, worker, self._progress)


def make_source(share: JsonObject, base: str, part: int, run: str) -> CollectingSource:
    """The source of share ``part``, in the process that collects it; ``share``: see ``ProcessSources``."""
    console.quiet = True  # progress bars are those of the process that learns
    if run:
        load_kept_files(Path(run))
    trainer: TrainerConfig = from_json(share["trainer"])
    env: EnvConfig = from_json(share["env"])
    device = torch.device(share["device"])
    start = placed(load_policy(base), device) if base else None
    context = RunContext(
        env,
        start,
        share["seed"],
        OneProcess(),
        share["demonstrations"],
        device,
        from_json(share["reward"]),
        collector=part,
        collectors=share["parts"],
    )
    made = trainer.build_env(context)
    return trainer.build_source(context, made, trainer.build_policy(context, made))
