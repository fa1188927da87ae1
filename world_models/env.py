"""A world model as an environment: the contract of a simulator, dreamt (``VecEnv`` and ``Snapshots``).

Every row has its own clock, seed and reset.  The model predicts in calls of ``F`` control steps that begin at multiples
of ``F`` on a row's own clock; an observation inside a call comes from predicting with the actions known so far, so that
a chunk of five equals five chunks of one.  How the task stands is asked when a call is whole or time is up.

A dream that doubts itself ends: truncated with the cause "uncertainty", so that its value is bootstrapped and it is no
failure.  So does one whose success is not there when the same actions are dreamt again with other noise (Dual-Noise
Verification, RAW-Dream; there the episode is dropped, which favours steering doomed dreams into the uncertain).  What
it shows last is what it showed before the call that it doubts.  No dream goes on from the doubtful, so nothing would
correct what a critic makes of its pictures, and a cube that seems lifted could be worth a success.

All noise is drawn from a row's seed and clock; equal seeds and actions give equal dreams, bit for bit, among any
neighbours (calls are padded to one size, because kernels differ with it).  In another row they are equal up to
rounding: a kernel may round the rows at the edge of a batch differently.

Dreams are where their model is.  On a GPU pictures and states stay there from call to call, and what is seen is given
as tensors of that device; clocks, ends, actions and noise are kept on the host, where the noise of a seed is the same
for every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.env import Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.rows import FAILURES, SUCCESS, TIME_LIMIT, EpisodeTracker, restore_rows, select_rows
from vla_rl.contract.spec import EnvSpec
from world_models.initial_states import Pool
from world_models.model import WorldModel
from world_models.types import Future, Now
from world_models.uncertainty import Limits

_LATE, _FAILED, _DOUBT = FAILURES, FAILURES + 1, FAILURES + 2


@dataclass(frozen=True)
class DreamConfig:
    """How far and how boldly to dream."""

    horizon: int = 25  # control steps at most; beyond, a dream is truncated like at a time limit
    deadline: int | None = None  # control steps after which an unfinished episode has failed
    keyframes: float = 0.5  # share of dreams that begin at a keyframe
    done: float = 0.5  # probability from which on the task counts as done
    failed: float = 0.5  # and as failed
    part: int = 16  # rows predicted together
    noise: int = 0  # chooses other noise for the same seeds
    again: int = 1  # how often a success is dreamt again before it counts


class ImaginedEnv:
    """``E`` dreams side by side, stepped without autoreset."""

    def __init__(
        self,
        model: WorldModel,
        starts: Pool,
        num_envs: int,
        limits: Limits | None = None,
        config: DreamConfig | None = None,
    ) -> None:
        """``limits``: how much doubt ends a dream; none does without.

        Raises UserError for a horizon of nothing, and warns of one beyond what ``limits`` were calibrated for.
        """
        self.model, self.starts, self.limits, self.config = model.eval(), starts, limits, config or DreamConfig()
        if self.config.horizon < 1 or num_envs < 1:
            raise UserError(
                f"{num_envs} dreams of {self.config.horizon} control steps leave nothing to imagine; give at least 1."
            )
        if limits is not None:
            limits.warn_beyond(self.config.horizon, model.config.frames)
        self.spec: EnvSpec = replace(
            model.spec,
            name=f"imagined {model.spec.name}",
            time_limit=self.config.horizon,
            max_chunk=min(model.spec.max_chunk, self.config.horizon),
            extras={},
            success="once",
            can_snapshot=True,
            device=str(model.device),
        )
        frames, size = model.config.frames, model.spec.state.shape[0]
        self._device = model.device
        self._book = EpisodeTracker(num_envs, ("too_late", "failed"), ("uncertainty",))
        self._seen = self._there(np.zeros((num_envs, 1 + model.config.memory, *model.picture), np.uint8))
        self._origin = self._there(np.zeros((num_envs, size), np.float32))  # state at the beginning of the call
        self._picture = self._there(np.zeros((num_envs, *model.picture), np.uint8))
        self._state = self._there(np.zeros((num_envs, size), np.float32))
        bounds = self.spec.state.low, self.spec.state.high
        self._bounds = [self._there(np.asarray(bound, np.float32)) for bound in bounds]
        self._task, self._depth = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._actions = np.zeros((num_envs, frames, model.spec.action_dim), np.float32)
        self._known = np.zeros(num_envs, np.int64)
        self._doubt, self._outcome = np.zeros(num_envs, np.float32), np.zeros((num_envs, 3), np.float32)
        # What a second dream begins with and repeats.
        self._begun = {name: deepcopy(getattr(self, f"_{name}")) for name in ("seen", "origin", "task")}
        self._history = np.zeros((num_envs, self.config.horizon, model.spec.action_dim), np.float32)
        other = replace(self.config, again=0)
        self._again = [
            ImaginedEnv(model, starts, other.part, None, replace(other, noise=other.noise + i + 1))
            for i in range(self.config.again)
        ]

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    @property
    def doubt(self) -> np.ndarray:
        """float32 [E]: how much each row doubts what it shows."""
        return self._doubt.copy()

    @property
    def outcome(self) -> np.ndarray:
        """float32 [E,3]: see ``Future.outcome``, for what each row shows."""
        return self._outcome.copy()

    def renew(self, starts: Pool, limits: Limits | None, config: DreamConfig) -> None:
        """Go on with other starts, limits and threshold, after the model has learnt more; horizons may only shorten."""
        config = replace(self.config, done=config.done, horizon=min(config.horizon, self.config.horizon))
        self.starts, self.limits, self.config = starts, limits, config
        for i, other in enumerate(self._again):
            other.renew(starts, None, config)
            other.config = replace(other.config, again=0, noise=config.noise + i + 1)

    def reset(self, rows: Any, seeds: Any) -> Observation:
        """Begin new dreams in ``rows`` (int [R]): ``seeds`` choose start and noise."""
        index = self._book.index(rows)
        seed = self._book.seeds(index, seeds)
        start = self.starts.draw(seed, self.config.keyframes)
        self._begin(index, seed, (self._there(start.pictures), self._there(start.state)), start.task)
        return self._observe()

    def _begin(self, index: np.ndarray, seed: np.ndarray, seen: tuple[Tensor, Tensor], task: np.ndarray) -> None:
        """In rows ``index``; ``seen``: pictures and state, as a ``Start`` has them."""
        self._seen[index], self._origin[index], self._task[index] = *seen, task
        self._picture[index], self._state[index] = seen[0][:, -1], seen[1]
        self._known[index] = self._depth[index] = 0
        self._actions[index], self._doubt[index], self._outcome[index] = 0.0, 0.0, 0.0
        self._history[index] = 0.0
        for name, item in self._begun.items():
            item[index] = getattr(self, f"_{name}")[index]
        self._book.begin(index, seed)

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Dream through ``chunk`` [E,H,D]; see ``VecEnv.step``.  A reward of 1 comes with success."""
        action = self._book.chunk(on_host(chunk), self.spec)
        rows, horizon = action.shape[:2]
        reward, valid = np.zeros((rows, horizon), np.float32), np.zeros((rows, horizon), bool)
        frames: list[Observation] = []
        for i in range(horizon):
            active = np.flatnonzero(~self._book.done)
            self._actions[active, self._known[active]] = action[active, i]
            self._history[active, self._book.time[active]] = action[active, i]
            self._known[active] += 1
            self._book.time[active] += 1
            valid[active, i] = True
            ripe = self._ripe(active)
            shown = active if observe == "all" or i == horizon - 1 else ripe
            if shown.size:
                self._advance(shown, ripe)
            reward[ripe, i] = self._book.success[ripe]
            if observe == "all":
                frames.append(self._observe())
        obs = frames[-1] if frames else self._observe()
        return self._book.step(obs, reward, valid, action, frames).mapped(self._told)

    def snapshot(self, rows: Any) -> Snapshot:
        """Everything the future of ``rows`` depends on; see ``Snapshots``."""
        index = self._book.index(rows)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, rows: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``rows``, which need not be those it was taken from."""
        restore_rows(self._arrays(), self._book.index(rows), snapshot)
        return self._observe()

    def close(self) -> None:
        """Nothing is held."""

    # -- dreaming ---------------------------------------------------------------------------------------------------

    def _ripe(self, rows: np.ndarray) -> np.ndarray:
        """Those of ``rows`` whose call is whole or whose time is up."""
        whole = self._known[rows] == self.model.config.frames
        ends = [limit for limit in (self.config.horizon, self.config.deadline) if limit is not None]
        ripe: np.ndarray = rows[whole | (self._book.time[rows] >= min(ends))]
        return ripe

    def _advance(self, rows: np.ndarray, ripe: np.ndarray) -> None:
        """Show ``rows`` what their known actions lead to, and judge those that are ``ripe`` among them."""
        future = self._predict(rows)
        every, known = np.arange(len(rows)), self._known[rows]
        self._picture[rows] = future.pictures[every, self.model.slot(known)]
        self._state[rows] = future.state[every, known - 1].clamp(*self._bounds)
        self._outcome[rows], self._doubt[rows] = future.outcome.cpu().numpy(), future.doubt.cpu().numpy()
        self._judge(ripe)
        doubted = ripe[self._book.cause[ripe] == _DOUBT]
        self._picture[doubted], self._state[doubted] = self._seen[doubted, -1], self._origin[doubted]
        whole = ripe[self._known[ripe] == self.model.config.frames]
        self._seen[whole, 1:-1] = self._seen[whole, 2:]
        self._seen[whole, -1], self._origin[whole] = self._picture[whole], self._state[whole]
        self._known[whole] = 0
        self._actions[whole] = 0.0
        self._depth[whole] += 1

    def _judge(self, rows: np.ndarray) -> None:
        """How ``rows`` [R] stand."""
        time, config, outcome = self._book.time[rows], self.config, self._outcome[rows]
        success = outcome[:, 0] >= config.done
        cause = np.where(time >= config.horizon, TIME_LIMIT, 0)
        if config.deadline is not None:
            cause = np.where(time >= config.deadline, _LATE, cause)
        cause = np.where(outcome[:, 1] >= config.failed, _FAILED, cause)
        cause = np.where(success, SUCCESS, cause)
        if self.limits is not None:
            unsure = self._doubt[rows] > self.limits.at(self._depth[rows])
            cause, success = np.where(unsure, _DOUBT, cause), success & ~unsure
        flipped = np.zeros_like(success)
        flipped[success] = ~self._confirmed(rows[success])
        self._book.end(rows, success & ~flipped, np.where(flipped, _DOUBT, cause))

    def _confirmed(self, rows: np.ndarray) -> np.ndarray:
        """bool [R]: whether the successes of ``rows`` are there in every other dream of the same actions."""
        confirmed = np.ones(len(rows), bool)
        for other in self._again:
            for part in _parts(np.arange(len(rows)), other.num_envs):
                confirmed[part] &= other._repeat(self, rows[part])
        return confirmed

    def _repeat(self, dream: ImaginedEnv, rows: np.ndarray) -> np.ndarray:
        """Dream what ``rows`` [R] of ``dream`` did; returns which of them succeed in as many steps."""
        index = np.concatenate([rows, np.full(self.num_envs - len(rows), rows[0])])
        begun = dream._begun
        seen = begun["seen"][index], begun["origin"][index]
        self._begin(np.arange(self.num_envs), dream._book.seed[index], seen, begun["task"][index])
        length = dream._book.time[index]
        for first in range(0, int(length.max()), self.model.config.frames):
            self.step(dream._history[index, first : first + self.model.config.frames])
        won: np.ndarray = self._book.success & (self._book.time <= length)
        return won[: len(rows)]

    def _predict(self, rows: np.ndarray) -> Future:
        parts = [self._call(part) for part in _parts(rows, self.config.part)]
        names = ("pictures", "state", "outcome", "doubt")
        return Future(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def _call(self, rows: np.ndarray) -> Future:
        """One call for up to ``part`` rows, padded with copies of the first."""
        padded = np.concatenate([rows, np.full(self.config.part - len(rows), rows[0])])
        noise = np.stack([self._noise(int(row)) for row in padded])
        task, actions, known = (self._there(item[padded]) for item in (self._task, self._actions, self._known))
        now = Now(self._seen[padded], self._origin[padded], task)
        future = self.model.predict(now, actions, known, self._there(noise))
        count = len(rows)
        return Future(future.pictures[:count], future.state[:count], future.outcome[:count], future.doubt[:count])

    def _noise(self, row: int) -> np.ndarray:
        """float32 [P,c,y,x]: a function of the row's seed, its call and ``config.noise`` alone."""
        key = np.random.SeedSequence([int(self._book.seed[row]), int(self._depth[row]), self.config.noise])
        shape = (self.model.config.pictures, *self.model.video.latent)
        return np.random.Generator(np.random.SFC64(key)).standard_normal(shape, np.float32)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        cameras = self._picture.movedim(1, -1).split(3, -1)
        images = {name: self._told(picture) for name, picture in zip(self.model.cameras, cameras, strict=True)}
        return Observation(images, *(self._told(item) for item in (self._state, self._task, self._book.time)))

    def _arrays(self) -> dict[str, Any]:
        own = ("seen", "origin", "picture", "state", "task", "depth", "actions", "known", "doubt", "outcome")
        arrays = {f"dream/{name}": getattr(self, f"_{name}") for name in (*own, "history")}
        arrays |= {f"begun/{name}": item for name, item in self._begun.items()}
        return self._book.arrays() | {name: self._view(item) for name, item in arrays.items()}

    def _there(self, item: np.ndarray) -> Tensor:
        """Where the model is."""
        return torch.from_numpy(item).to(self._device)

    def _view(self, item: Any) -> Any:
        """The same memory, in the words of the contract: an array on the host, a tensor elsewhere."""
        return item.numpy() if isinstance(item, Tensor) and self.spec.device == "cpu" else item

    def _told(self, item: Any) -> Any:
        """A copy in the words of the contract."""
        there = torch.as_tensor(item, device=self._device)
        return self._view(there.clone(memory_format=torch.contiguous_format))


def _parts(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]
