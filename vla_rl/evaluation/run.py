"""Evaluate a policy: play one episode per seed and record the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vla_rl.contract.env import Array, Observation, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.driver import Driver


@dataclass(frozen=True)
class Outcomes:
    """One entry per seed, in the order of the seeds.

    success bool [n]; cause and family (the kind of task) are texts; length int [n], in low-level actions; returns float
    [n], undiscounted sums of rewards.  ``has_success`` is False for an environment without a notion of success
    (``spec.success`` None): ``success`` is then False throughout and means nothing.
    """

    seeds: np.ndarray
    success: np.ndarray
    cause: tuple[str, ...]
    length: np.ndarray
    family: tuple[str, ...]
    returns: np.ndarray
    has_success: bool = True

    @property
    def score(self) -> Rate | MeanReturn:
        """The headline number: the success rate, or the mean return where the environment has no success."""
        return self.rate if self.has_success else MeanReturn.of(self.returns)

    @property
    def rate(self) -> Rate:
        """Share of successes with its Wilson interval."""
        return Rate.of(self.success)

    @property
    def families(self) -> dict[str, Rate]:
        """Success by kind of task, in the order of their names."""
        kinds = np.array(self.family)
        return {name: Rate.of(self.success[kinds == name]) for name in sorted(set(self.family))}

    def share(self, cause: str) -> Rate:
        """Share of episodes that ended for ``cause``."""
        return Rate.of([item == cause for item in self.cause])


def evaluate(
    env: VecEnv,
    policy: Policy,
    seeds: Sequence[int],
    noise_seed: int = 0,
    view: Callable[[Observation], Observation] = lambda obs: obs,
    report: Callable[[int, int], None] = lambda episodes, successes: None,
) -> Outcomes:
    """Play every one of ``seeds`` once with ``policy`` in mode "eval"; an ended environment takes the next seed.

    ``view`` changes the observations of the policy (blanks the images, for example); ``report(episodes, successes)`` is
    called whenever episodes end.  Raises UserError without a seed.

    Every episode draws its noise from a generator of its own, seeded by ``noise_seed`` and the episode's seed, so an
    outcome does not depend on the number of environments, on their order, or on the other seeds.  That holds exactly
    as far as simulator and network compute an environment equally in batches of any size; matrix products of different
    batch sizes may differ in the last bits.
    """
    generators = [_episode_generator(noise_seed, 0)] * env.num_envs
    return _Evaluation(Driver(env, policy, generators, "eval", view=view), seeds, noise_seed, report).run()


def _episode_generator(noise_seed: int, episode_seed: int) -> torch.Generator:
    mixed = np.random.SeedSequence([noise_seed, episode_seed]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))


class _Evaluation:
    def __init__(
        self,
        driver: Driver,
        seeds: Sequence[int],
        noise_seed: int,
        report: Callable[[int, int], None],
    ) -> None:
        self.driver, self.seeds, self.noise_seed, self.report = driver, np.asarray(seeds), noise_seed, report
        self.playing = np.full(driver.env.num_envs, -1)  # index into seeds, -1 for an environment without one
        self.queue = iter(range(len(self.seeds)))
        self.success = np.zeros(len(self.seeds), bool)
        self.length = np.zeros(len(self.seeds), np.int64)
        self.returns = np.zeros(len(self.seeds))
        self.cause = [""] * len(self.seeds)
        self.family = [""] * len(self.seeds)
        self.ended = 0
        if not len(self.seeds):
            raise UserError("no seeds were given, so there is nothing to evaluate; give at least one.")

    def run(self) -> Outcomes:
        self._refill(np.arange(self.driver.env.num_envs))
        while (self.playing >= 0).any():
            self._refill(self._record(self.driver.step().step))
        ends = self.success, tuple(self.cause), self.length, tuple(self.family), self.returns
        return Outcomes(self.seeds, *ends, has_success=self.driver.env.spec.success is not None)

    def _record(self, step: Step) -> Array:
        """Record the outcomes of ended episodes; returns their ``env_ids``."""
        active = self.playing >= 0
        self.length[self.playing[active]] += _sum(step.valid)[active]
        self.returns[self.playing[active]] += _sum(step.reward)[active]
        ended = np.flatnonzero(on_host(step.done) & active)
        for env_id in ended:
            self.success[self.playing[env_id]] = bool(step.success[env_id])
            self.cause[self.playing[env_id]] = step.cause[int(env_id)]
        self.ended += len(ended)
        if len(ended):
            self.report(self.ended, int(self.success.sum()))
        return ended

    def _refill(self, env_ids: Array) -> None:
        """Give ``env_ids`` their next seeds.  At the start all are reset, surplus ones with the first seed."""
        self.playing[env_ids] = [next(self.queue, -1) for _ in env_ids]
        playing = env_ids[self.playing[env_ids] >= 0]
        reset = env_ids if self.driver.obs is None else playing
        for env_id in playing:
            self.driver.generator[env_id] = _episode_generator(self.noise_seed, int(self.seeds[self.playing[env_id]]))
        obs = self.driver.reset(reset, self.seeds[np.maximum(self.playing[reset], 0)])
        for env_id in playing:
            self.family[self.playing[env_id]] = self.driver.env.spec.family(int(obs.task[env_id]))


def _sum(per_action: Array) -> np.ndarray:
    return on_host(per_action).sum(1)
