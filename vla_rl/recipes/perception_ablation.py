"""Perception ablations: success with blank images, with shuffled images and with a swapped instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
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


def ablate_perception(
    env_config: EnvConfig, policies: Mapping[str, Policy], config: EvaluationConfig, seed: int
) -> dict[str, PerceptionAblation]:
    """The checks for every policy, shared by the processes that ``config`` names."""
    seeds = [int(item) for item in seed_ranges.held_out(seed_ranges.VALIDATION, config.ablation)]
    run = _check_here if config.processes == 1 else _check_in_processes
    with bar("see and read", len(CHECKS) * len(policies)) as update:
        found = run(env_config, policies, seeds, config, seed, update)
    return {name: PerceptionAblation(*rates) for name, rates in found.items()}


def _check_here(
    env_config: EnvConfig,
    policies: Mapping[str, Policy],
    seeds: list[int],
    config: EvaluationConfig,
    seed: int,
    update: Callable[[int, str], None],
) -> dict[str, list[Rate]]:
    found: dict[str, list[Rate]] = {name: [] for name in policies}
    for done, (name, check) in enumerate(product(policies, CHECKS), 1):
        found[name] += check_perception(env_config, policies[name], check, seeds, config.num_envs, seed)
        update(done, name)
    return found


def _check_in_processes(
    env_config: EnvConfig,
    policies: Mapping[str, Policy],
    seeds: list[int],
    config: EvaluationConfig,
    seed: int,
    update: Callable[[int, str], None],
) -> dict[str, list[Rate]]:
    env, pool = remote_env(env_config), workers(config.processes)
    with ExitStack() as folders:
        folder = {name: folders.enter_context(saved(policy)) for name, policy in policies.items()}
        waiting = {
            pool.submit(
                "check_perception",
                env=env,
                policy=folder[name],
                check=check,
                seeds=seeds,
                num_envs=config.num_envs,
                noise_seed=seed,
            ): (name, check)
            for name, check in product(policies, CHECKS)
        }
        rates = {}
        for done, future in enumerate(as_completed(waiting), 1):
            rates[waiting[future]] = [Rate(**rate) for rate in future.result()["rates"]]
            update(done, waiting[future][0])
    return {name: [rate for check in CHECKS for rate in rates[name, check]] for name in policies}


def check_perception(
    env_config: EnvConfig, policy: Policy, check: str, seeds: list[int], num_envs: int, noise_seed: int
) -> list[Rate]:
    """One of ``CHECKS``: the rate of success; "swapped": of the named object, and of the original target."""
    if check == "swapped":
        with closing(_Watch(env_config.make_swapped(num_envs))) as watch:
            named = evaluate(watch, policy, seeds, noise_seed=noise_seed)
        return [named.rate, Rate.of([watch.former.get(seed, False) for seed in seeds])]
    view = {"normal": _same, "blank": _blank, "shuffled": _shuffle}[check]
    with closing(env_config.make(num_envs)) as env:
        return [evaluate(env, policy, seeds, noise_seed=noise_seed, view=view).rate]


def _same(obs: Observation) -> Observation:
    return obs


def _blank(obs: Observation) -> Observation:
    return replace(obs, images={name: np.zeros_like(image) for name, image in obs.images.items()})


def _shuffle(obs: Observation) -> Observation:
    return replace(obs, images={name: np.roll(image, 1, axis=0) for name, image in obs.images.items()})


class _Watch:
    """An environment that notes, per seed, whether the object that the seed chose was the one lifted."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.former = env, dict[int, bool]()
        self.seed = np.zeros(env.num_envs, np.int64)
        self.spec, self.num_envs, self.close = env.spec, env.num_envs, env.close

    def reset(self, env_ids, seeds):  # type: ignore[no-untyped-def]
        self.seed[env_ids] = seeds
        return self.env.reset(env_ids, seeds)

    def step(self, chunk, observe="last"):  # type: ignore[no-untyped-def]
        step = self.env.step(chunk, observe)
        lifted, seeded = step.obs.extras["privileged/lifted"], step.obs.extras["privileged/seeded"]
        for row in np.flatnonzero(step.done):
            self.former[int(self.seed[row])] = bool(lifted[row] == seeded[row])
        return step
