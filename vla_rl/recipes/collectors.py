"""Processes that collect: each has a share of the environments and rebuilds its parts from the config's JSON."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from vla_rl.contract.batch import OneProcess
from vla_rl.contract.config import from_json, to_json
from vla_rl.experience.background import CollectingSource
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.worker import Worker
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.context import RunContext, placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import remote_env, saved
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import console
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.recipes.workers import workers

_MAKE = "vla_rl.recipes.collectors:make_source"


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
