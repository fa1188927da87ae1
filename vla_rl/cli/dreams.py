"""A world model between a simulator and reinforcement learning: what it learns from, and its dreams as a world.

The world model's classes are named by strings, since nothing of ours may depend on them but at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_rl.cli.method import generator
from vla_rl.cli.progress import bar
from vla_rl.cli.world import World
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import suite
from vla_rl.experience.traces import Traces, seen_at, trace
from vla_rl.policies.clumsy import ClumsyPolicy


@dataclass(frozen=True)
class Gather:
    """Episodes of the simulator that a world model learns from; every one is paid for."""

    own: int = 300  # the policy itself, with the noise that it explores with
    clumsy: int = 150  # with a share of its decisions at random: near-successes, and failures of all kinds
    random: int = 50  # random play: what things do when nobody means anything
    clumsiness: float = 0.3
    held_out: int = 100  # of all of them, for limits and agreement
    rows: int = 32

    @property
    def episodes(self) -> int:
        """All of them."""
        return self.own + self.clumsy + self.random


def gather(world: World, policy: Policy, plan: Gather, seed: int) -> tuple[Traces, Traces]:
    """Play what ``plan`` says; returns the episodes to learn from and those held out, in equal mixtures.

    Raises UserError when nothing would be left to learn from.
    """
    if not 0 < plan.held_out < plan.episodes:
        raise UserError(
            f"{plan.held_out} of {plan.episodes} episodes held out leave nothing to learn from, or to judge by; change "
            "one of the numbers."
        )
    env = world.training(plan.rows)
    seeds = iter(suite.training_seeds(seed, "dreams"))
    shares = (("own", plan.own, 0.0), ("clumsy", plan.clumsy, plan.clumsiness), ("random", plan.random, 1.0))
    parts = []
    for name, count, share in shares:
        if count:
            player = ClumsyPolicy(policy, env.spec, share) if share else policy
            with bar(f"play {name}", count) as update:
                told = _told(update)
                parts.append(
                    trace(env, player, [next(seeds) for _ in range(count)], generator(seed, 30), "sample", told)
                )
    env.close()
    traces = Traces.joined(parts)
    order = np.random.default_rng([seed, 31]).permutation(traces.count)
    return traces.chosen(np.sort(order[plan.held_out :])), traces.chosen(np.sort(order[: plan.held_out]))


def _told(update: Callable[[int, str], None]) -> Callable[[int, int], None]:
    return lambda episodes, won: update(episodes, f"success {won / episodes:.0%}")


def replayed(model: Any, traces: Traces, dream: Any) -> Any:
    """The world model's replay of every one of ``traces``, from its first moment to its last action."""
    spans = traces.spans()
    config, begins = model.config, np.array([begin for begin, _ in spans])
    start = load("world_models.starts:Start")(**seen_at(traces, begins, config.frames, config.memory))
    with bar("replay", len(spans)) as update:
        actions = [traces.action[begin : end - 1] for begin, end in spans]
        return load("world_models.replay:replay")(model, start, actions, dream, lambda done: update(done, "episodes"))


def promise(model: Any, traces: Traces) -> np.ndarray:
    """float [M]: how likely the model thinks success in the end, at every moment of ``traces``.

    Asked at the end of every call that follows the recorded course, and interpolated between.
    """
    config, frames = model.config, model.config.frames
    spans = traces.spans()
    asked = [(m, end) for begin, end in spans for m in range(begin, end - 1, frames)]
    now = np.array([m for m, _ in asked])
    known = np.array([min(frames, end - 1 - m) for m, end in asked])
    start = seen_at(traces, now, frames, config.memory)
    ahead = np.minimum(now[:, None] + np.arange(frames), (now + known - 1)[:, None])
    chooser, told = generator(0, 32), []
    with bar("value", len(now)) as update:
        for first in range(0, len(now), 64):
            part = slice(first, first + 64)
            items = {name: torch.from_numpy(item[part]) for name, item in start.items()}
            seen = load("world_models.model:Now")(**items)
            noise = torch.randn(len(seen.task), config.pictures, *model.video.latent, generator=chooser)
            actions = torch.from_numpy(traces.action[ahead[part]])
            told.append(model.predict(seen, actions, torch.from_numpy(known[part]), noise).outcome[:, 2].numpy())
            update(min(first + 64, len(now)), "moments")
    value, seen_value, at = np.zeros(len(traces.state)), np.concatenate(told), now + known
    for begin, end in spans:
        inside = (at > begin) & (at < end)
        value[begin:end] = np.interp(np.arange(begin, end), at[inside], seen_value[inside])
    return value


def starts_of(model: Any, traces: Traces, value: np.ndarray, keyframes: Any) -> Any:
    """Where dreams begin: the first moments of ``traces``, and keyframes mined with ``value`` [M] of every moment."""
    spans, config, spec = traces.spans(), model.config, model.spec
    reach = np.subtract(spec.action.high, spec.action.low) * np.ones(spec.action_dim)
    found = load("world_models.keyframes:mine")(traces.action, reach, value, traces.success, spans, keyframes)
    kinds = (np.array([begin for begin, _ in spans]), found.all)
    start = load("world_models.starts:Start")
    made = [start(**seen_at(traces, moments, config.frames, config.memory)) for moments in kinds]
    return load("world_models.starts:Starts")(*made)


@dataclass(frozen=True)
class DreamWorld:
    """A world model in the place of a simulator (``Playground``)."""

    model: Any
    starts: Any
    limits: Any
    config: Any  # a ``DreamConfig``: dreams to learn from

    def make(self, rows: int) -> VecEnv:
        """Dreams of whole episodes, to judge by."""
        return self._env(rows, keyframes=0.0)

    def training(self, rows: int) -> VecEnv:
        """Dreams to learn from."""
        return self._env(rows)

    def _env(self, rows: int, **changed: Any) -> VecEnv:
        config = replace(self.config, **changed)
        env: VecEnv = load("world_models.env:ImaginedEnv")(self.model, self.starts, rows, self.limits, config)
        return env
