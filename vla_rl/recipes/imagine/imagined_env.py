"""A world model between recorded episodes and reinforcement learning: replays, where dreams begin, dreams as a world.

The world model's classes are named by strings, since nothing of ours may depend on them but at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from vla_rl.contract.env import Observation, VecEnv, on_host
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.experience.driver import Driver
from vla_rl.experience.trajectories import Trajectories
from vla_rl.experience.windows import context_at
from vla_rl.recipes.context import generator
from vla_rl.recipes.progress import bar


def replayed(model: Any, trajectories: Trajectories, dream: Any) -> Any:
    """The world model's replay of every one of ``trajectories``, from its first moment to its last action.

    As often as ``dream`` dreams a success again, with the same noise as it does then; what is seen is that of the first
    time, and it is as sure of success as the least sure.
    """
    spans = trajectories.spans()
    config, begins = model.config, np.array([begin for begin, _ in spans])
    start = load("world_models.initial_states:Start")(**context_at(trajectories, begins, config.frames, config.memory))
    actions = [trajectories.action[begin : end - 1] for begin, end in spans]
    times = 1 + dream.again
    found = []
    with bar("replay", times * len(spans)) as update:
        for again in range(times):
            other = replace(dream, noise=dream.noise + again)
            before = again * len(spans)
            found.append(
                load("world_models.replay:replay")(
                    model, start, actions, other, lambda done, before=before: update(before + done, "episodes")
                )
            )
    return replace(found[0], sure=np.min([one.sure for one in found], 0))


def promise(model: Any, trajectories: Trajectories) -> np.ndarray:
    """float [M]: how likely the model thinks success in the end, at every moment of ``trajectories``.

    Asked at the end of every call that follows the recorded course, and interpolated between.
    """
    config, frames = model.config, model.config.frames
    spans = trajectories.spans()
    asked = [(m, end) for begin, end in spans for m in range(begin, end - 1, frames)]
    now = np.array([m for m, _ in asked])
    known = np.array([min(frames, end - 1 - m) for m, end in asked])
    start = context_at(trajectories, now, frames, config.memory)
    ahead = np.minimum(now[:, None] + np.arange(frames), (now + known - 1)[:, None])
    chooser, hopes = generator(0, 32), []
    with bar("value", len(now)) as update:
        for first in range(0, len(now), 64):
            part = slice(first, first + 64)
            seen = {name: torch.from_numpy(item[part]).to(model.device) for name, item in start.items()}
            noise = torch.randn(len(now[part]), config.pictures, *model.video.latent, generator=chooser)
            told = (torch.from_numpy(trajectories.action[ahead[part]]), torch.from_numpy(known[part]), noise)
            future = model.predict(load("world_models.model:Now")(**seen), *(item.to(model.device) for item in told))
            hopes.append(future.outcome[:, 2].cpu().numpy())
            update(min(first + 64, len(now)), "moments")
    value, seen_value, at = np.zeros(len(trajectories.state)), np.concatenate(hopes), now + known
    for begin, end in spans:
        inside = (at > begin) & (at < end)
        value[begin:end] = np.interp(np.arange(begin, end), at[inside], seen_value[inside])
    return value


def starts_of(model: Any, trajectories: Trajectories, value: np.ndarray, keyframes: Any) -> Any:
    """Where dreams begin: the first moments of ``trajectories``, and keyframes mined with ``value`` [M]."""
    spans, config, spec = trajectories.spans(), model.config, model.spec
    reach = np.subtract(spec.action.high, spec.action.low) * np.ones(spec.action_dim)
    found = load("world_models.keyframes:mine")(
        trajectories.action, reach, value, trajectories.success, spans, keyframes
    )
    kinds = (np.array([begin for begin, _ in spans]), found.all)
    start = load("world_models.initial_states:Start")
    made = [start(**context_at(trajectories, moments, config.frames, config.memory)) for moments in kinds]
    return load("world_models.initial_states:Starts")(*made)


@dataclass(frozen=True)
class Watched:
    """Dreams of a policy: share of successes, share ended by doubt, inverse-dynamics residual."""

    success: float
    doubt: float
    slip: float


def watch(env: VecEnv, model: Any, policy: Policy, seeds: Sequence[int], noise: torch.Generator) -> Watched:
    """Dream whole episodes of ``policy``, exploring, one for each row of ``env``; decisions are calls of ``model``."""
    driver, slips = Driver(env, policy, noise), []
    driver.start(seeds)
    for decision in driver.until_done():
        step = decision.step
        doubted = np.array([cause == "uncertainty" for cause in step.cause])  # its picture is the one before
        whole = np.flatnonzero(on_host(step.valid).all(1) & ~doubted)
        if len(whole) and step.executed.shape[1] == model.config.frames:
            executed = torch.as_tensor(step.executed, device=model.device)
            before, after = _channels(model, decision.obs), _channels(model, step.obs)
            slips.append(model.slip(before[whole], after[whole], executed[whole]))
    slip = float(torch.cat(slips).mean()) if slips else 0.0
    return Watched(float(on_host(step.success).mean()), float(np.mean(doubted)), slip)


def _channels(model: Any, obs: Observation) -> torch.Tensor:
    """uint8 [E,C,h,w], cameras side by side."""
    pictures = torch.cat([torch.as_tensor(obs.images[name], device=model.device) for name in model.cameras], -1)
    return pictures.movedim(-1, 1).contiguous()


class DreamWorld:
    """A world model in the place of a simulator (``EnvFactory``); what it made is renewed with it."""

    def __init__(self, model: Any, starts: Any, limits: Any, config: Any) -> None:
        """``config``: a ``DreamConfig``, of dreams to learn from."""
        self.model, self.starts, self.limits, self.config = model, starts, limits, config
        self._made: WeakSet[Any] = WeakSet()  # dreams that somebody still has

    def make(self, rows: int) -> VecEnv:
        """Dreams of whole episodes, to judge by."""
        return self._env(rows, keyframes=0.0)

    def make_training(self, rows: int) -> VecEnv:
        """Dreams to learn from."""
        return self._env(rows)

    def renew(self, starts: Any, limits: Any, config: Any) -> None:
        """After the model has learnt more."""
        self.starts, self.limits, self.config = starts, limits, config
        for env in self._made:
            env.renew(starts, limits, config)

    def _env(self, rows: int, **changed: Any) -> VecEnv:
        config = replace(self.config, **changed)
        env: VecEnv = load("world_models.env:ImaginedEnv")(self.model, self.starts, rows, self.limits, config)
        self._made.add(env)
        return env
