"""Environments that a scripted person watches: taken over where one visibly fails, or driven to demonstrate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_rl.contract.config import check_limits
from vla_rl.contract.env import Observation, Observe, Step, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.experience.person import InterventionRule, People, PersonConfig


class SupervisedEnv:
    """``env`` whose robots a person watches (``VecEnv``): ``Step.intervened`` says where the person acted.

    ``expert(obs) -> [E,>=1,D]`` is what the person wants to do, ``progress(obs) -> [E]`` what the person sees; both may
    read ``privileged/*``.  The policy's actions are executed one after the other; after a take-over the rest of its
    chunk is not executed, and control is handed back at the next decision, as on a robot.  The noise of an episode
    follows from its seed.  One person watches all robots: whether they may begin depends on ``max_share`` of them all.
    """

    def __init__(
        self,
        env: VecEnv,
        expert: Callable[[Observation], np.ndarray],
        progress: Callable[[Observation], np.ndarray],
        config: PersonConfig,
        people: People | None = None,
    ) -> None:
        """``people`` watch other environments as well, None: one for every robot of this one.

        Raises UserError for an environment on a device: experts are on the host."""
        if env.spec.device != "cpu":
            raise UserError(
                f"{env.spec.name!r} is on {env.spec.device}, where a scripted person cannot act; choose one on the CPU."
            )
        self.env, self.config, self._expert, self._progress = env, config, expert, progress
        self.spec, self.num_envs = env.spec, env.num_envs
        low, high = (np.broadcast_to(np.asarray(end, np.float32), env.spec.action.shape) for end in _bounds(env))
        self._low, self._high = low, high
        self._generators = [np.random.default_rng(0) for _ in range(env.num_envs)]
        self._rule = InterventionRule(config, env.num_envs, people)
        self._allowed: np.ndarray | None = None  # bool [E]: where the person may take over, None: everywhere
        self._obs: Observation | None = None

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._rule.share

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """See ``VecEnv``."""
        self._obs = obs = self.env.reset(env_ids, seeds)
        rows = on_host(env_ids).astype(np.intp)
        for row, seed in zip(rows, on_host(seeds), strict=True):
            self._generators[row] = np.random.default_rng([int(seed), 1])
        self._rule.begin(rows, self._seen(obs))
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        self._rule.hand_back()
        wanted, steps, persons = on_host(chunk), [], []
        for h in range(wanted.shape[1]):
            persons.append(self._rule.acting)
            steps.append(self.env.step(self._action(wanted[:, h], persons[-1])[:, None], observe))
            self._obs = steps[-1].obs
            self._rule.watch(self._seen(steps[-1].obs), on_host(steps[-1].valid)[:, 0], self._allowed)
        return joined(steps, np.stack(persons, 1))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    # -- the person -------------------------------------------------------------------------------------------------

    def _action(self, wanted: np.ndarray, person: np.ndarray) -> np.ndarray:
        """What is executed [E,D]."""
        if not person.any():
            return wanted
        assert self._obs is not None
        noise = np.zeros_like(wanted)
        for row in np.flatnonzero(person):
            noise[row] = self._generators[row].normal(0.0, self.config.noise, wanted.shape[1])
        shown = self._expert(self._obs)[:, 0] + noise * (self._high - self._low) / 2
        found: np.ndarray = np.where(person[:, None], np.clip(shown, self._low, self._high), wanted).astype(np.float32)
        return found

    def _seen(self, obs: Observation) -> np.ndarray:
        """How far the tasks have come, as the person sees it [E]."""
        try:
            return np.asarray(self._progress(obs), float)
        except Exception as error:  # of whoever wrote the function
            raise ContractError(
                f"how far the task of {self.env.spec.name!r} has come cannot be said ({cause_of(error)}), so nobody "
                "would know when to take over; name a function of its own observations as the config's progress."
            ) from error


def _bounds(env: VecEnv) -> tuple[Any, Any]:
    return env.spec.action.low, env.spec.action.high


def joined(steps: list[Step], person: np.ndarray) -> Step:
    """Steps of one action each as one of ``H``, in which a person acted where ``person`` [E,H] (or [E,1])."""
    valid, reward, executed = (
        np.concatenate([on_host(getattr(step, name)) for step in steps], 1) for name in ("valid", "reward", "executed")
    )
    frames = tuple(frame for step in steps for frame in step.frames)
    last = steps[-1]
    return replace(last, valid=valid, reward=reward, executed=executed, intervened=person & valid, frames=frames)


@dataclass(frozen=True)
class DemonstratorConfig:
    """How much a person demonstrates."""

    max_share: float = 0.2  # of all steps so far; an episode is demonstrated while less was
    steps: int = 10_000  # after so many no further episode is

    def __post_init__(self) -> None:
        check_limits(self, max_share=(0, 1), steps=(0, math.inf))


class DemonstratedEnv:
    """``env`` in which a person does some episodes from beginning to end (``VecEnv``), as ``Step.intervened`` says.

    ``expert(obs) -> [E,>=1,D]`` is what the person does, without noise, as in recorded demonstrations.
    """

    def __init__(self, env: VecEnv, expert: Callable[[Observation], np.ndarray], config: DemonstratorConfig) -> None:
        self.env, self.config, self._expert = env, config, expert
        self.spec, self.num_envs = env.spec, env.num_envs
        self._person = np.zeros(env.num_envs, bool)
        self._steps, self._shown = 0, 0
        self._obs: Observation | None = None

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """See ``VecEnv``."""
        self._obs = self.env.reset(env_ids, seeds)
        wanted = self._shown < self.config.steps and self._shown <= self.config.max_share * self._steps
        self._person[on_host(env_ids).astype(np.intp)] = wanted
        return self._obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        wanted, steps = on_host(chunk), []
        for h in range(wanted.shape[1]) if self._person.any() else ():
            assert self._obs is not None
            shown = self._expert(self._obs)[:, 0]
            action = np.where(self._person[:, None], shown, wanted[:, h]).astype(np.float32)
            steps.append(self.env.step(action[:, None], observe))
            self._obs = steps[-1].obs
        step = joined(steps, self._person[:, None]) if steps else self.env.step(chunk, observe)
        self._obs = step.obs
        valid = on_host(step.valid)
        self._steps += int(valid.sum())
        self._shown += int(valid[self._person].sum())
        return step

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
