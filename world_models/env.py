"""A world model as an environment: imagined rollouts behind a simulator's contract (``VecEnv`` and ``Snapshots``).

Every environment has its own clock, seed and reset; a rollout that begins in the midst of an episode, at a keyframe,
goes on with that episode's clock: deadlines and critics read it.  The model predicts ``F`` control steps per call, one
call after the other from where the rollout begins.  An observation inside a call is predicted from the actions known so
far, so a chunk of five gives the same result as five chunks of one.  Success, failure and uncertainty are evaluated
when a call is complete or time is up; the first two inside a call as well, where ``outcome_every`` asks for it.

A rollout whose uncertainty exceeds the limit is truncated with the cause "uncertainty", and its value is bootstrapped:
it is no failure.  A success is also truncated this way unless it happens again when the same actions are predicted with
other noise (Dual-Noise Verification, RAW-Dream; there the episode is dropped, which favours steering failing rollouts
into uncertainty).  A truncated rollout shows the observation before the uncertain call.  No rollout continues from an
uncertain frame, so no data would correct a critic's value of it, and a cube that seems lifted could be worth a success.

All noise is a function of seed and clock: equal seeds and actions give equal rollouts, bit for bit, in any environment
slot and with any neighbours (calls are padded to one batch size, because kernels differ with it).

Tensors live on the model's device.  On a GPU frames and states stay there from call to call, and observations are
tensors of that device; clocks, causes and noise are kept on the host, where the noise of a seed is the same for every
device.  The host waits for the device once for every call of the model, since that says whose rollout ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.env import EnvSpec, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import FAILURES, SUCCESS, TIME_LIMIT, DeviceTracker, read, restore_rows, select_rows
from world_models.config import ImaginationConfig, Limits
from world_models.initial_states import Pool
from world_models.model import WorldModel
from world_models.types import Context, Future, state_entries

_LATE, _FAILED, _UNCERTAIN = FAILURES, FAILURES + 1, FAILURES + 2


class ImaginedEnv:
    """``E`` imagined rollouts side by side, stepped without autoreset.

    uncertainty  float32 [E]    see ``Future.uncertainty``, for what each environment shows; as are the others, it is
                                overwritten by the next step
    outcome      float32 [E,3]  see ``Future.outcome``, for what each environment shows
    earned       float32 [E]    what the known actions of the call that was predicted last earn, apart from its end
    """

    def __init__(
        self,
        model: WorldModel,
        initial_states: Pool,
        num_envs: int,
        limits: Limits | None = None,
        config: ImaginationConfig | None = None,
    ) -> None:
        """``limits``: the uncertainty that ends a rollout; None ends none.

        Raises UserError for a horizon below 1, and warns of one beyond what ``limits`` were calibrated for.
        """
        self.model, self.initial_states, self.limits = model.eval(), initial_states, limits
        self.config = config or ImaginationConfig()
        self.config.reward.require(model.config.reward)
        if self.config.horizon < 1 or num_envs < 1:
            raise UserError(
                f"{num_envs} rollouts of {self.config.horizon} control steps leave nothing to imagine; give at least 1."
            )
        if limits is not None:
            limits.warn_beyond(self.config.horizon, model.config.frames)
        self.num_envs, self.spec = num_envs, imagined_spec(model, self.config)
        frames, size = model.config.frames, state_entries(model.spec)
        self._device = model.device
        self._book = DeviceTracker(num_envs, self._to_device, ("too_late", "failed"), ("uncertainty",))
        # What the present call is predicted from: context frames, and the state at its beginning.
        pictures = partial(torch.zeros, num_envs, dtype=torch.uint8, device=self._device)
        zeros = partial(torch.zeros, num_envs, dtype=torch.float32, device=self._device)
        self._context_frames = pictures(1 + model.config.context_frames, *model.picture)
        self._context_state = zeros(size)
        # The present observation.
        self._picture, self._state = pictures(*model.picture), zeros(size)
        self._entries = self.spec.state.shape[0]  # of the state that policies see
        bounds = (self.spec.state.low, self.spec.state.high) if self._entries else (0.0, 0.0)
        self._bounds = [self._to_device(np.asarray(bound, np.float32)) for bound in bounds]
        self._task, self._depth = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._start_time = np.zeros(num_envs, np.int64)  # the episode's clock where the rollout began
        self._actions = zeros(frames, model.spec.action_dim)  # of the present call
        self._known = np.zeros(num_envs, np.int64)  # how many of these are known
        self.uncertainty: np.ndarray = np.zeros(num_envs, np.float32)
        self.outcome: np.ndarray = np.zeros((num_envs, 3), np.float32)
        self.earned: np.ndarray = np.zeros(num_envs, np.float32)
        self._finite = np.zeros(num_envs, bool)  # whether the present state is known to be finite
        self._begun: list[Tensor] = []  # states of the last reset's observation, where they are known to be finite
        # Called with pictures uint8 [R,C,h,w] before and after, and actions [R,F,D], of whole calls that are certain.
        self.on_call: Callable[[Tensor, Tensor, Tensor], None] | None = None
        # What resampling begins with and replays.
        self._initial = {
            name: deepcopy(getattr(self, f"_{name}"))
            for name in ("context_frames", "context_state", "task", "start_time")
        }
        self._action_history = zeros(self.config.reach, model.spec.action_dim)
        other = replace(self.config, resamples=0)
        self._resampling_envs = [
            ImaginedEnv(
                model, initial_states, other.batch_size, None, replace(other, noise_seed=other.noise_seed + i + 1)
            )
            for i in range(self.config.resamples)
        ]

    @property
    def pictures(self) -> Any:
        """uint8 [E,C,h,w]: what each environment shows, as it was predicted (``Canvas``)."""
        return self._view(self._picture.clone())

    def renew(self, initial_states: Pool, limits: Limits | None, config: ImaginationConfig) -> None:
        """Continue with other initial states, limits, threshold and horizon, after the model was trained further.

        Running rollouts end at the new horizon, those that are older with their next action.  Raises UserError for a
        horizon beyond ``ImaginationConfig.longest``.
        """
        if config.horizon > self.config.reach:
            raise UserError(
                f"a horizon of {config.horizon} control steps is beyond the {self.config.reach} that these imagined "
                "environments were made for, so they cannot be renewed with it; give them a longer "
                "ImaginationConfig.longest."
            )
        config = replace(self.config, success_threshold=config.success_threshold, horizon=config.horizon)
        self.initial_states, self.limits, self.config = initial_states, limits, config
        self.spec = imagined_spec(self.model, config)
        for other in self._resampling_envs:  # each keeps its own noise
            other.renew(initial_states, None, config)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Begin new rollouts in ``env_ids`` (int [R]); ``seeds`` choose initial state and noise."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        start = self.initial_states.draw(seed, self.config.keyframe_share)
        context = self._to_device(start.pictures), self._to_device(start.state)
        self._begin(index, seed, context, start.task, start.time)
        self._finite[index] = np.isfinite(start.state).all(1)
        obs = self._observe()
        self._begun = [obs.state] if self._finite.all() else []
        return obs

    def _begin(
        self, index: np.ndarray, seed: np.ndarray, context: tuple[Tensor, Tensor], task: np.ndarray, time: np.ndarray
    ) -> None:
        """Begin rollouts in the environments ``index``; ``context``: frames and state, as in ``InitialStates``."""
        rows = self._to_device(index)
        self._context_frames[rows], self._context_state[rows], self._task[index] = *context, task
        self._picture[rows], self._state[rows] = context[0][:, -1], context[1]
        self._known[index], self._depth[index], self._start_time[index] = 0, 0, time
        self._actions[rows], self._action_history[rows] = 0.0, 0.0
        self.uncertainty[index], self.outcome[index], self._finite[index] = 0.0, 0.0, False
        for name, item in self._initial.items():
            where = rows if isinstance(item, Tensor) else index
            item[where] = getattr(self, f"_{name}")[where]
        self._book.begin(index, seed)
        self._book.time[index] = time

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Predict through ``chunk`` [E,H,D]; see ``VecEnv.step``.  A call that is complete is paid (``payment.py``)."""
        action, refused = self._book.checked(chunk, self.spec, self._to_device(~self._book.done))
        reward, valid = np.zeros(action.shape[:2], np.float32), np.zeros(action.shape[:2], bool)
        before, horizon = (self._known.copy(), self._book.time.copy()), action.shape[1]
        frames: list[Observation] = []
        for i in range(horizon):
            active = np.flatnonzero(~self._book.done)
            self._keep_actions(active, action[:, i], refused)
            self._known[active] += 1
            self._book.time[active] += 1
            valid[active, i] = True
            complete = self._call_complete(active)
            looked = np.union1d(complete, self._due(active))
            shown = active if observe == "all" or i == horizon - 1 else looked
            if shown.size:
                advanced = self._advance(shown, complete, refused)
                if advanced is None:
                    self._known[:], self._book.time[:] = before
                    self._book.chunk(on_host(chunk), self.spec)  # raises, and names what was refused
                else:
                    complete = advanced
            reward[complete, i] = self.config.reward.paid(self.earned[complete], self._book.success[complete])
            if observe == "all":
                frames.append(self._observe())
        obs = frames[-1] if frames else self._observe()
        told = (self._to_device(reward), reward), (self._to_device(valid), valid)
        finite = [told[0][0], obs.state, *self._begun] if self._finite.all() else []
        return self._book.step_there(obs, told, action, frames, finite).mapped(self._view)

    def snapshot(self, env_ids: Any) -> Snapshot:
        index = self._book.index(env_ids)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        index = self._book.index(env_ids)
        restore_rows(self._arrays(), index, snapshot)
        self._finite[index] = False
        return self._observe()

    def close(self) -> None:
        """Nothing is held."""

    # -- model steps ------------------------------------------------------------------------------------------------

    def _call_complete(self, env_ids: np.ndarray) -> np.ndarray:
        """Those of ``env_ids`` whose call has all its actions or whose time is up."""
        whole = self._known[env_ids] == self.model.config.frames
        return env_ids[whole | self._out_of_time(env_ids) | self._too_late(env_ids)]

    def _due(self, env_ids: np.ndarray) -> np.ndarray:
        """Those of ``env_ids`` whose outcome is looked at inside the call."""
        every = self.config.outcome_every
        return env_ids[self._known[env_ids] % every == 0] if every else env_ids[:0]

    def _age(self, env_ids: np.ndarray) -> np.ndarray:
        """int [R]: control steps since the rollout began."""
        return self._book.time[env_ids] - self._start_time[env_ids]

    def _out_of_time(self, env_ids: np.ndarray) -> np.ndarray:
        """bool [R]: whose rollout has reached the horizon."""
        return self._age(env_ids) >= self.config.horizon

    def _too_late(self, env_ids: np.ndarray) -> np.ndarray:
        """bool [R]: whose episode has reached its deadline."""
        deadline = self.config.deadline
        return self._book.time[env_ids] >= (np.inf if deadline is None else deadline)

    def _keep_actions(self, env_ids: np.ndarray, action: Tensor, refused: Tensor) -> None:
        """Write ``action`` [E,D] of ``env_ids`` into their calls and histories, unless it is ``refused``."""
        rows = self._to_device(env_ids)
        for kept, place in ((self._actions, self._known[env_ids]), (self._action_history, self._age(env_ids))):
            at = rows, self._to_device(place)
            kept[at] = torch.where(refused, kept[at], action[rows])

    def _advance(self, env_ids: np.ndarray, complete: np.ndarray, refused: Tensor) -> np.ndarray | None:
        """Predict the observations of ``env_ids`` from their known actions; end those that must.

        Returns whose call is over: ``complete``, and those that were done or had failed when they were looked at inside
        it.  The host waits for the device here.  Where it learns that actions were ``refused``, nothing changes and the
        result is None.
        """
        future, rows = self._predict(env_ids, complete), self._to_device(env_ids)
        every, known = (self._to_device(item) for item in (np.arange(len(env_ids)), self._known[env_ids]))
        state = future.state[every, known - 1].clamp(*self._bounds)
        earned = self.config.reward.earned(future)
        told = {"outcome": future.outcome, "uncertainty": future.uncertainty, "earned": earned}
        found = read({"refused": refused, "finite": state.isfinite().all(1) & earned.isfinite(), **told})
        if found["refused"]:
            return None
        self._finite[env_ids] = found["finite"]
        self._picture[rows], self._state[rows] = future.pictures[every, self.model.call.slot(known)], state
        for name in told:
            getattr(self, name)[env_ids] = found[name]
        due = self._due(env_ids)
        complete = np.union1d(complete, due[np.logical_or(*self._read_outcome(due))])
        self._end_episodes(complete)
        uncertain = complete[self._book.cause[complete] == _UNCERTAIN]
        self._finite[uncertain], self.earned[uncertain] = True, 0.0  # they show what was shown before
        rows = self._to_device(uncertain)
        self._picture[rows], self._state[rows] = self._context_frames[rows, -1], self._context_state[rows]
        whole = complete[self._known[complete] == self.model.config.frames]
        certain = self._to_device(np.setdiff1d(whole, uncertain))
        if self.on_call is not None and len(certain):
            self.on_call(self._context_frames[certain, -1], self._picture[certain], self._actions[certain])
        rows = self._to_device(whole)
        self._context_frames[rows, 1:-1] = self._context_frames[rows, 2:]
        self._context_frames[rows, -1], self._context_state[rows] = self._picture[rows], self._state[rows]
        self._known[whole] = 0
        self._actions[rows] = 0.0
        self._depth[whole] += 1
        return complete

    def _read_outcome(self, env_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bool [R] each: success and failure of ``env_ids`` [R]."""
        outcome, config = self.outcome[env_ids], self.config
        return outcome[:, 0] >= config.success_threshold, outcome[:, 1] >= config.failure_threshold

    def _end_episodes(self, env_ids: np.ndarray) -> None:
        """Success, failure, uncertainty and time limits of ``env_ids`` [R], whose call is complete."""
        success, failed = self._read_outcome(env_ids)
        cause = np.where(self._out_of_time(env_ids), TIME_LIMIT, 0)
        cause = np.where(self._too_late(env_ids), _LATE, cause)
        cause = np.where(failed, _FAILED, cause)
        cause = np.where(success, SUCCESS, cause)
        if self.limits is not None:
            uncertain = self.uncertainty[env_ids] > self.limits.at(self._depth[env_ids])
            cause, success = np.where(uncertain, _UNCERTAIN, cause), success & ~uncertain
        flipped = np.zeros_like(success)
        flipped[success] = ~self._succeeds_when_resampled(env_ids[success])
        self._book.end(env_ids, success & ~flipped, np.where(flipped, _UNCERTAIN, cause))

    def _succeeds_when_resampled(self, env_ids: np.ndarray) -> np.ndarray:
        """bool [R]: whether the same actions succeed under every other noise as well."""
        confirmed = np.ones(len(env_ids), bool)
        for other in self._resampling_envs:
            for part in _batches(np.arange(len(env_ids)), other.num_envs):
                confirmed[part] &= other._replay_success(self, env_ids[part])
        return confirmed

    def _replay_success(self, original: ImaginedEnv, env_ids: np.ndarray) -> np.ndarray:
        """bool [R]: which of ``env_ids`` [R] of ``original`` succeed here, by the same actions in as many steps."""
        index = np.concatenate([env_ids, np.full(self.num_envs - len(env_ids), env_ids[0])])
        initial = original._initial
        context = initial["context_frames"][index], initial["context_state"][index]
        seed, length = original._book.seed[index], original._age(index)
        self._begin(np.arange(self.num_envs), seed, context, initial["task"][index], initial["start_time"][index])
        for first in range(0, int(length.max()), self.model.config.frames):
            self.step(original._action_history[index, first : first + self.model.config.frames])
        success: np.ndarray = self._book.success & (self._age(np.arange(self.num_envs)) <= length)
        return success[: len(env_ids)]

    def _predict(self, env_ids: np.ndarray, complete: np.ndarray) -> Future:
        """Of ``env_ids`` [R].  What no call goes on from and no outcome is read of is denoised in one step."""
        looked_at = np.setdiff1d(env_ids, complete)
        parts = [self._call(part, 0) for part in _batches(complete, self.config.batch_size)]
        parts += [self._call(part, self.config.mid_call_steps) for part in _batches(looked_at, self.config.batch_size)]
        order = self._to_device(np.argsort(np.concatenate([complete, looked_at]), kind="stable"))
        names = [name for name, item in vars(parts[0]).items() if item is not None]
        return Future(**{name: torch.cat([getattr(part, name) for part in parts])[order] for name in names})

    def _call(self, env_ids: np.ndarray, steps: int) -> Future:
        """One model call for up to ``batch_size`` environments, padded with copies of the first."""
        padded = np.concatenate([env_ids, np.full(self.config.batch_size - len(env_ids), env_ids[0])])
        noise = np.stack([self._noise(int(i)) for i in padded])
        task, known, rows = (self._to_device(item) for item in (self._task[padded], self._known[padded], padded))
        context = Context(self._context_frames[rows], self._context_state[rows], task)
        future = self.model.predict(context, self._actions[rows], known, self._to_device(noise), steps)
        return Future(**{name: item[: len(env_ids)] for name, item in vars(future).items() if item is not None})

    def _noise(self, env_id: int) -> np.ndarray:
        """float32 [P,c,y,x]: a function of the environment's seed, its call and ``config.noise_seed`` alone."""
        key = np.random.SeedSequence([int(self._book.seed[env_id]), int(self._depth[env_id]), self.config.noise_seed])
        shape = (self.model.config.pictures, *self.model.video.latent)
        return np.random.Generator(np.random.SFC64(key)).standard_normal(shape, np.float32)

    def _observe(self) -> Observation:
        images = {name: self._output(picture) for name, picture in self.model.canvas.split(self._picture).items()}
        rest = self._state[:, : self._entries], self._task, self._book.time
        return Observation(images, *(self._output(item) for item in rest))

    def _arrays(self) -> dict[str, Any]:
        call = ("context_frames", "context_state", "task", "start_time", "depth", "actions", "known")
        names = (*call, "picture", "state", "action_history")
        arrays = {f"rollout/{name}": getattr(self, f"_{name}") for name in names}
        arrays |= {f"rollout/{name}": getattr(self, name) for name in ("uncertainty", "outcome")}
        arrays |= {f"initial/{name}": item for name, item in self._initial.items()}
        return self._book.arrays() | {name: self._view(item) for name, item in arrays.items()}

    def _to_device(self, item: np.ndarray) -> Tensor:
        """A copy of ``item`` on the device; the host does not wait for it."""
        return torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)

    def _view(self, item: Any) -> Any:
        """``item`` as the contract has it, sharing its memory: an array on the host, a tensor elsewhere."""
        return item.numpy() if isinstance(item, Tensor) and self.spec.device == "cpu" else item

    def _output(self, item: Any) -> Any:
        moved = item.clone(memory_format=torch.contiguous_format) if isinstance(item, Tensor) else self._to_device(item)
        return self._view(moved)


def _batches(env_ids: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for begin in range(0, len(env_ids), size):
        yield env_ids[begin : begin + size]


def imagined_spec(model: WorldModel, config: ImaginationConfig) -> EnvSpec:
    """The spec of imagined environments: only its time limit changes when they are renewed.

    A rollout that begins at a keyframe, anywhere in an episode, goes on with that episode's clock.
    """
    longest = config.horizon + (model.spec.time_limit if config.keyframe_share else 0)
    return replace(
        model.spec,
        name=f"imagined {model.spec.name}",
        time_limit=longest,
        max_chunk=min(model.spec.max_chunk, config.reach),
        extras={},
        success="once",
        can_snapshot=True,
        device=str(model.device),
    )
