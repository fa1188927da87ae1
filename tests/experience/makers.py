"""What the acting processes of the tests are made of: plain functions, found by "tests.experience.makers:NAME"."""

from __future__ import annotations

import os
import sys
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sims.catalog import make
from sims.toy.counting import CountingEnv
from tests.auditing import AuditingPolicy
from vla_rl.contract.batch import Rollout
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy


def gaussian(env: str, num_envs: int, decisions: int, horizon: int, seed: int) -> RolloutSource:
    """A Gaussian policy in a toy environment; ``seed`` decides its weights, its noise and the episodes."""
    toy = make(env, num_envs=num_envs)
    torch.manual_seed(seed)
    policy = GaussianPolicy(toy.spec, config=GaussianConfig(horizon, width=32))
    noise = torch.Generator().manual_seed(seed)
    return RolloutSource(toy, policy, decisions, SeedStream(1000 * seed, 1000 * seed + 500), noise)


def recorded(action: np.ndarray, **changes: Any) -> Demonstrations:
    """One episode of the actions [T,D], in which all is empty or zero that ``changes`` do not give."""
    count = len(action)
    zeros, state = np.zeros(count, np.int64), np.zeros((count, 0), np.float32)
    found = Demonstrations({}, state, zeros, np.arange(count), action, zeros, zeros - 1, ("push",), fps=10.0)
    return replace(found, **changes)


def equal_rollouts(one: Rollout, other: Rollout) -> bool:
    """Bit for bit, but for counters and times."""
    names = [item.name for item in fields(Rollout) if item.name not in ("info", "spans", "robot", "stream")]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    flat = [pair for a, b in pairs for pair in ([(a, b)] if torch.is_tensor(a) else [(a[n], b[n]) for n in {**a, **b}])]
    return (one.robot, one.stream) == (other.robot, other.stream) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in flat
    )


class Patient(AuditingPolicy):
    """Does not mind resets in mid-episode, which a breakdown brings."""

    def reset_state(self, state: Any, env_ids: Any) -> Any:
        fresh = state["fresh"].clone()
        fresh[torch.as_tensor(env_ids)] = True
        return {**state, "fresh": fresh}


class NanPolicy(AuditingPolicy):
    """Chooses a NaN for environment 2 at its eighth decision, unless mended."""

    calls, mended = 0, False

    def act(self, features: Any, state: Any, mode: Any, generator: Any) -> Any:
        out, after = super().act(features, state, mode, generator)
        self.calls += 1
        if self.calls >= 8 and not self.mended:
            out.action[2, 0, 1] = float("nan")
        return out, after


def luck(seed: int, member: int, size: int) -> float:
    """What the last step of the so-manieth episode of ``seed`` earns more: all the same for two seeds in five."""
    if seed % 5 < 2:
        return 0.0
    return float(member == seed % size) if seed % 5 < 4 else float(member % 3)


class LuckyEnv(CountingEnv):
    """The counting environment in which the episodes of one seed earn different returns."""

    def __init__(self, num_envs: int, size: int = 4, *more: Any) -> None:
        super().__init__(num_envs, *more)
        self.size, self.started, self.member = size, Counts[int](), np.zeros(num_envs, int)
        self.acting: list[tuple[int, int]] = []  # at every step: episodes started so far, active environments

    def _begin(self, row: int, seed: int) -> None:
        super()._begin(row, seed)
        self.member[row] = self.started[seed] % self.size
        self.started[seed] += 1

    def _advance(self, env_ids: Any, action: Any) -> Any:
        reward, success, late = super()._advance(env_ids, action)
        extra = [luck(int(self._seed[env_id]), int(self.member[env_id]), self.size) for env_id in env_ids]
        return reward + np.where(success | late, extra, 0).astype(np.float32), success, late

    def step(self, chunk: Any, observe: Any = "last") -> Any:
        self.acting.append((sum(self.started.values()), int((~self._book.done).sum())))
        return super().step(chunk, observe)


class Counter:
    """Counts, and gives back."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def echo(self, value: Any) -> Any:
        return value

    def kinds(self, value: dict[str, Any]) -> list[str]:
        return [type(item).__name__ for item in (value["a"], value["b"][0], value["b"][1]["c"])]

    def count_to(self, last: int, report: Callable[[int, int], None]) -> int:
        for number in range(1, last + 1):
            report(number, number**2)
        return last

    def variable(self, name: str) -> str:
        return os.environ[name]

    def threads(self) -> str:
        return str(torch.get_num_threads())

    def _secret(self) -> None:
        """Not to be called from elsewhere."""


class Annealed(RolloutSource):
    """Reports in ``info`` the progress that was published to its policy."""

    def deliver(self) -> Rollout:
        rollout = super().deliver()
        return replace(rollout, info={**rollout.info, "progress": self.policy.progress})


def annealed(**options: Any) -> RolloutSource:
    """As :func:`gaussian`, with a policy that has ``set_progress``."""
    source = gaussian(**options)
    policy: Any = source.policy
    policy.progress, policy.set_progress = 0.0, partial(setattr, policy, "progress")
    source.__class__ = Annealed
    return source


class Failing:
    """Writes to standard output, and misbehaves at its second, third and fourth rollout."""

    def __init__(self) -> None:
        self.source, self.calls = gaussian("point_mass", 2, 2, 1, 0), 0
        self.policy = self.source.policy

    def next(self) -> Rollout:
        self.calls += 1
        print("a library that talks to standard output", "x" * 10_000)
        os.write(1, b"and one that does it below Python")
        assert sys.stdin.read() == ""
        if self.calls == 2:
            raise ZeroDivisionError("the wheel came off")
        if self.calls == 3:
            with torch.no_grad():
                self.policy.log_std.fill_(float("nan"))
        if self.calls == 4:
            os.abort()
        return self.source.next()


def failing() -> Failing:
    """A source with troubles."""
    return Failing()


def counting(part: int, parts: int) -> RolloutSource:
    """Share ``part`` of the counting environment's episodes, audited by the policy."""
    seeds, toy = SeedStream(300 + part, 300_000, parts), make("counting", num_envs=3)
    return RolloutSource(toy, AuditingPolicy(4), 6, seeds, torch.Generator())
