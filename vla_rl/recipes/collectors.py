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


def process_sources(
    trainer: TrainerConfig, shares: list[RunContext], progress: Callable[[], float]
) -> list[CollectingSource]:
    """A source for each of ``shares``, in a worker process of its own; ``progress`` as for ``ProcessSource``.

    Raises UserError for an environment or policy that another process cannot make.
    """
    pool = workers(len(shares))
    first = shares[0]
    given = {
        "trainer": to_json(trainer),
        "env": remote_env(first.env),
        "seed": first.seed,
        "parts": first.parts,
        "demonstrations": first.demonstrations,
        "device": str(first.device),
        "run": pool.run,
    }
    with ExitStack() as folders:
        base = "" if first.base is None else folders.enter_context(saved(first.base))
        return [
            ProcessSource(_MAKE, {**given, "base": base, "part": share.part}, worker, progress)
            for share, worker in zip(shares, pool.all, strict=False)
        ]


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
