"""Perception ablations: success with blank images, with shuffled images and with a swapped instruction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from vla_rl.contract.env import Observation
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.driver import Decision
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, remote_env, saved
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.workers import workers


@dataclass(frozen=True)
class PerceptionAblation:
    """Rates on the same validation seeds.

    normal            the named object is lifted
    blank             the same with black images
    shuffled          the same with the images of other environments
    swapped_named     the instruction names a distractor: that object is lifted
    swapped_original  the instruction names a distractor: the original target is lifted
    """

    normal: Rate
    blank: Rate
    shuffled: Rate
    swapped_named: Rate
    swapped_original: Rate


CHECKS = ("normal", "blank", "shuffled", "swapped")
Done: TypeAlias = tuple[tuple[str, str], list[Rate]]  # policy, check


def ablate_perception(
    env_config: EnvConfig, policies: Mapping[str, Policy], config: EvaluationConfig, seed: int
) -> dict[str, PerceptionAblation]:
    """The checks for every policy, shared by the processes that ``config`` names."""
    seeds = [int(item) for item in seed_ranges.held_out(seed_ranges.VALIDATION, config.ablation)]
    numbers = seeds, config.num_envs, seed
    jobs, rates = list(product(policies, CHECKS)), dict[tuple[str, str], list[Rate]]()
    with bar("see and read", len(jobs)) as update:
        done: Iterator[Done]
        if config.processes == 1:
            done = ((job, check_perception(env_config, policies[job[0]], job[1], *numbers)) for job in jobs)
        else:
            done = _in_processes(env_config, policies, jobs, numbers, config.processes)
        for count, (job, found) in enumerate(done, 1):
            rates[job] = found
            update(count, job[0])
    return {name: PerceptionAblation(*(rate for check in CHECKS for rate in rates[name, check])) for name in policies}


def _in_processes(
    env_config: EnvConfig,
    policies: Mapping[str, Policy],
    jobs: list[tuple[str, str]],
    numbers: tuple[Any, ...],
    processes: int,
) -> Iterator[Done]:
    """Each of ``jobs``, (policy, check), with its rates when they are there."""
    pool = workers(processes)
    given: dict[str, Any] = dict(zip(("seeds", "num_envs", "noise_seed"), numbers, strict=True))
    with ExitStack() as folders:
        env, folder = (
            remote_env(env_config),
            {name: folders.enter_context(saved(one)) for name, one in policies.items()},
        )
        waiting = {
            pool.submit("check_perception", env=env, policy=folder[name], check=check, **given): (name, check)
            for name, check in jobs
        }
        for future in as_completed(waiting):
            yield waiting[future], [Rate(**rate) for rate in future.result()["rates"]]


def check_perception(
    env_config: EnvConfig, policy: Policy, check: str, seeds: list[int], num_envs: int, noise_seed: int
) -> list[Rate]:
    """One of ``CHECKS``: the rate of success; "swapped": of the named object, and of the original target."""
    if check == "swapped":
        former = dict[int, bool]()  # by seed: whether the object that the seed chose was the one lifted

        def note(decision: Decision) -> None:
            lifted, seeded = (decision.step.obs.extras[f"privileged/{name}"] for name in ("lifted", "seeded"))
            for row in np.flatnonzero(decision.step.done):
                former[int(decision.seeds[row])] = bool(lifted[row] == seeded[row])

        with closing(env_config.make_swapped(num_envs)) as env:
            named = evaluate(env, policy, seeds, noise_seed=noise_seed, watch=note)
        return [named.rate, Rate.of([former.get(seed, False) for seed in seeds])]
    view = {"normal": lambda obs: obs, "blank": _blank, "shuffled": _shuffle}[check]
    with closing(env_config.make(num_envs)) as env:
        return [evaluate(env, policy, seeds, noise_seed=noise_seed, view=view).rate]


def _blank(obs: Observation) -> Observation:
    return replace(obs, images={name: np.zeros_like(image) for name, image in obs.images.items()})


def _shuffle(obs: Observation) -> Observation:
    return replace(obs, images={name: np.roll(image, 1, axis=0) for name, image in obs.images.items()})
