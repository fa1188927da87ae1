"""Perception ablations: success with blank images, with shuffled images and with a swapped instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import suite
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.progress import bar
from vla_rl.recipes.stages import EvaluationConfig


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


def ablate_perception(
    env_config: EnvConfig, policies: Mapping[str, Policy], config: EvaluationConfig, seed: int
) -> dict[str, PerceptionAblation]:
    """The checks for every policy."""
    plain, swapped = env_config.make(config.num_envs), env_config.make_swapped(config.num_envs)
    with bar("see and read", 4 * len(policies)) as update:
        found = {
            name: _check(plain, swapped, policy, config, seed, partial(_count, update, 4 * i, name))
            for i, (name, policy) in enumerate(policies.items())
        }
    plain.close()
    swapped.close()
    return found


def _count(update: Callable[[int, str], None], before: int, name: str, done: int) -> None:
    update(before + done, name)


def _check(
    plain: VecEnv, swapped: VecEnv, policy: Policy, config: EvaluationConfig, seed: int, update: Callable[[int], None]
) -> PerceptionAblation:
    seeds = suite.held_out(suite.VALIDATION, config.ablation)
    rates = []
    for k, view in enumerate((lambda obs: obs, _blank, _shuffle)):
        rates.append(evaluate(plain, policy, seeds, noise_seed=seed, view=view).rate)
        update(k + 1)
    watch = _Watch(swapped)
    named = evaluate(watch, policy, seeds, noise_seed=seed)
    update(4)
    former = Rate.of([watch.former.get(seed, False) for seed in seeds])
    return PerceptionAblation(rates[0], rates[1], rates[2], named.rate, former)


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
