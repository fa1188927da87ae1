"""A person watches robots and takes over where one visibly fails: scripted, for simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, Observe, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits


@dataclass(frozen=True)
class PersonConfig:
    """What a person sees and how they act; steps are control steps.

    A robot visibly fails when its progress has reached no new best for ``patience`` steps, or has fallen ``slip`` below
    its best.  Progress is a number from 0 to 1 that a person could estimate by eye, such as how near the gripper is and
    how high the cube.
    """

    patience: int = 10
    slip: float = 0.15
    gain: float = 0.02  # of progress that counts as a new best
    delay: int = 4  # steps from what is seen to the hand
    hold: int = 10  # steps of an intervention, at least; it ends at a new best, between two decisions of the policy
    noise: float = 0.1  # std of the person's actions, in half-ranges of the action
    max_share: float = 0.2  # of all steps so far; an intervention of ``hold`` steps that would exceed it is not begun

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, patience=count, delay=(0, math.inf), hold=count, noise=(0, math.inf))
        check_limits(self, slip=(0, 1), gain=(0, 1), max_share=(0, 1))


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
    ) -> None:
        """Raises UserError for an environment on a device: experts are on the host."""
        if env.spec.device != "cpu":
            raise UserError(
                f"{env.spec.name!r} is on {env.spec.device}, where a scripted person cannot act; choose one on the CPU."
            )
        self.env, self.config, self._expert, self._progress = env, config, expert, progress
        self.spec, self.num_envs = env.spec, env.num_envs
        low, high = (np.broadcast_to(np.asarray(end, np.float32), env.spec.action.shape) for end in _bounds(env))
        self._low, self._high = low, high
        self._generators = [np.random.default_rng(0) for _ in range(env.num_envs)]
        self._best = np.zeros(env.num_envs)
        self._stalled = np.zeros(env.num_envs, int)  # steps since the last new best
        self._seen = np.zeros(env.num_envs, int)  # steps for which failure has been visible
        self._held = np.zeros(env.num_envs, int)  # steps of the intervention, 0 without one
        self._recovered = np.zeros(env.num_envs, bool)  # a new best since the person took over
        self._steps, self._intervened = 0, 0
        self._obs: Observation | None = None

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._intervened / max(1, self._steps)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """See ``VecEnv``."""
        self._obs = obs = self.env.reset(env_ids, seeds)
        rows = on_host(env_ids).astype(np.intp)
        for row, seed in zip(rows, on_host(seeds), strict=True):
            self._generators[row] = np.random.default_rng([int(seed), 1])
        self._best[rows] = self._progress(obs)[rows]
        for counter in (self._stalled, self._seen, self._held, self._recovered):
            counter[rows] = 0
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        self._hand_back()
        wanted, steps, persons = on_host(chunk), [], []
        for h in range(wanted.shape[1]):
            persons.append(self._held > 0)
            steps.append(self.env.step(self._action(wanted[:, h], persons[-1])[:, None], observe))
            self._obs = steps[-1].obs
            self._watch(steps[-1].obs, on_host(steps[-1].valid)[:, 0])
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

    def _watch(self, obs: Observation, running: np.ndarray) -> None:
        """Look at what a control step has led to; take over where failure has been visible for long enough."""
        config, progress = self.config, np.asarray(self._progress(obs), float)
        self._steps += int(running.sum())
        self._intervened += int((running & (self._held > 0)).sum())
        better = progress > self._best + config.gain
        self._best = np.where(better, progress, self._best)
        self._stalled = np.where(better, 0, self._stalled + 1)
        failing = (self._stalled >= config.patience) | (progress < self._best - config.slip)
        self._seen = np.where(failing & running, self._seen + 1, 0)
        self._recovered |= better
        begins = (self._held == 0) & running & (self._seen > config.delay)
        begins[np.flatnonzero(begins)[self._affordable() :]] = False
        self._held = np.where(begins, 1, np.where(self._held > 0, self._held + 1, 0))
        self._recovered &= ~begins
        # What was best before a fall is not asked for again.
        self._best = np.where(begins, progress, self._best)

    def _affordable(self) -> int:
        """How many interventions of ``hold`` steps may begin now, so that the share is kept when they end."""
        share, open_steps = self.config.max_share, self.config.hold - self._held[self._held > 0]
        pending = np.maximum(open_steps, 0).sum()
        cost = (1.0 - share) * self.config.hold
        left = share * (self._steps + pending) - self._intervened - pending
        return max(0, int(left / cost)) if cost else self.num_envs

    def _hand_back(self) -> None:
        done = (self._held > self.config.hold) & self._recovered
        for counter in (self._held, self._seen, self._stalled):
            counter[done] = 0


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
