"""Gymnasium environments with vector observations behind the environment contract, without autoreset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from vla_rl.contract.env import PRIVILEGED, Observation, Observe, Snapshot, Step
from vla_rl.contract.errors import UserError
from vla_rl.contract.rows import DIVERGED, FAILURES, TIME_LIMIT, EpisodeTracker, restore_rows, select_rows
from vla_rl.contract.spec import ArraySpec, EnvSpec


class GymEnv:
    """``E`` Gymnasium environments of one id behind the environment contract (``VecEnv`` and ``Snapshots``).

    state   float32 [E,S]    the observation without its privileged entries, in Gymnasium's units
    extras  {"privileged/NAME": float32 [E,n]}  entries for critics and rewards only
    action  float32 [E,H,D]  within the bounds of the action space

    Rewards are Gymnasium's own.  Its termination is the cause "terminated", its truncation "time_limit" (both at once:
    terminated); an observation that is not finite truncates the episode ("diverged", reward 0) and is not returned.
    Gymnasium has no notion of success: ``spec.success`` is None and ``success`` is always False; compare returns.

    A snapshot is a seed and the actions since the reset: ``restore`` replays them.  This is exact for environments
    whose episodes depend on seed and actions only, as Gymnasium requires, and takes as long as the episode took.

    Environments are stepped one after the other: a pool of two threads took 0.9 to 1.5 times as long for six MuJoCo
    tasks on two cores, since most of a step of these small models is Python.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], privileged: Mapping[str, Sequence[int]]) -> None:
        """``envs`` are equal and owned by this object; ``privileged`` names entries of their observation."""
        self._envs = envs
        one = envs[0]
        size = _vector(one, "observation", one.observation_space).shape[0]
        self._privileged = {PRIVILEGED + name: _entries(name, chosen, size) for name, chosen in privileged.items()}
        taken = [entry for chosen in self._privileged.values() for entry in chosen]
        self._public = np.setdiff1d(np.arange(size), np.array(taken, int))
        self.spec = _spec(one, self._public, self._privileged)
        self._book = EpisodeTracker(len(envs), ("terminated",))
        self._obs = np.zeros((len(envs), size), np.float32)
        self._actions = np.zeros((len(envs), self.spec.time_limit, self.spec.action_dim), np.float32)

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        for env_id, value in zip(index.tolist(), seed.tolist(), strict=True):
            self._obs[env_id] = self._envs[env_id].reset(seed=value)[0]
        self._book.begin(index, seed)
        self._actions[index] = 0
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D]; see ``VecEnv.step``."""
        action = self._book.chunk(chunk, self.spec)
        reward, valid = np.zeros(action.shape[:2], np.float32), np.zeros(action.shape[:2], bool)
        frames: list[Observation] = []
        for i in range(action.shape[1]):
            active = np.flatnonzero(~self._book.done)
            valid[active, i] = True
            self._actions[active, self._book.time[active]] = action[active, i]
            self._book.time[active] += 1
            cause = np.zeros(active.size, np.int8)
            for k, env_id in enumerate(active.tolist()):
                reward[env_id, i], cause[k] = self._advance(env_id, action[env_id, i])
            self._book.end(active, np.zeros(active.size, bool), cause)
            if observe == "all":
                frames.append(self._observe())
        obs = frames[-1] if frames else self._observe()
        return self._book.step(obs, reward, valid, action, frames)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Seeds, clocks, ends and the actions since the reset, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(env_ids)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids`` by replaying its actions."""
        index = self._book.index(env_ids)
        restore_rows(self._arrays(), index, snapshot)
        for env_id in index.tolist():
            self._obs[env_id] = self._envs[env_id].reset(seed=int(self._book.seed[env_id]))[0]
            for action in self._actions[env_id, : self._book.time[env_id]]:
                self._advance(env_id, action)
        return self._observe()

    def close(self) -> None:
        """Close every Gymnasium environment; safe to call twice."""
        for env in self._envs:
            env.close()

    def _advance(self, env_id: int, action: np.ndarray) -> tuple[float, int]:
        """Execute one action [D] in ``env_id``: its reward, and the code of the cause of its end (0: still running)."""
        obs, reward, terminated, truncated, _ = self._envs[env_id].step(action)
        if not (np.isfinite(obs).all() and math.isfinite(reward)):
            return 0.0, DIVERGED
        self._obs[env_id] = obs
        return float(reward), FAILURES if terminated else TIME_LIMIT if truncated else 0

    def _observe(self) -> Observation:
        extras = {name: self._obs[:, entries] for name, entries in self._privileged.items()}
        task = np.zeros(self.num_envs, np.int64)
        return Observation({}, self._obs[:, self._public], task, self._book.time.copy(), extras)

    def _arrays(self) -> dict[str, np.ndarray]:
        return self._book.arrays() | {"actions": self._actions}


def make(
    num_envs: int,
    id: str = "InvertedPendulum-v5",
    privileged: Mapping[str, Sequence[int]] | None = None,
    time_limit: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> GymEnv:
    """``num_envs`` environments of Gymnasium's ``id``.

    privileged  {name: entries of the observation} for critics only, as ``privileged/name``
    time_limit  actions per episode, where Gymnasium's registry has none or another one is wanted
    arguments   of the environment itself (``{"healthy_reward": 0.0}``)

    Raises UserError for an id that cannot be made and for spaces that are not vectors of numbers: images, texts, dicts
    and discrete actions are not supported.
    """
    if num_envs < 1:
        raise UserError(f"num_envs={num_envs} leaves nothing to simulate; give at least 1.")
    limit = {} if time_limit is None else {"max_episode_steps": time_limit}
    try:
        envs = [gymnasium.make(id, disable_env_checker=True, **limit, **(arguments or {})) for _ in range(num_envs)]
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(
            f"Gymnasium cannot make {id!r} ({str(error).rstrip('.')}), so there is no environment; check the id and "
            "its arguments, or install its requirements (pip install 'gymnasium[mujoco]')."
        ) from error
    return GymEnv(envs, privileged or {})


def _spec(one: gymnasium.Env[Any, Any], shown: np.ndarray, hidden: Mapping[str, list[int]]) -> EnvSpec:
    name = one.spec.id if one.spec else type(one).__name__
    limit = one.spec.max_episode_steps if one.spec else None
    if not limit:
        raise UserError(
            f"{name!r} has no time limit in Gymnasium's registry, so its episodes might never end; give the option "
            "time_limit, in actions."
        )
    space, action_space = one.observation_space, _vector(one, "action", one.action_space)
    if not action_space.is_bounded():
        raise UserError(
            f"the actions of {name!r} have no bounds, so none would be safe; wrap it to have some (RescaleAction)."
        )
    per_second = one.metadata.get("render_fps") or 1
    return EnvSpec(
        name=name,
        images={},
        state=_array_spec(space, shown),
        action=_array_spec(action_space, np.arange(action_space.shape[0])),
        tasks=(name,),
        control_dt=float(getattr(one.unwrapped, "dt", 1 / per_second)),
        time_limit=limit,
        max_chunk=limit,
        success=None,
        extras={key: _array_spec(space, entries) for key, entries in hidden.items()},
        can_snapshot=True,
    )


def _array_spec(space: Any, entries: Sequence[int] | np.ndarray) -> ArraySpec:
    """The declared bounds; where they are infinite, a policy has to normalize by statistics of data."""
    low, high = (tuple(bound[list(entries)].tolist()) for bound in (space.low, space.high))
    return ArraySpec((len(entries),), "float32", low, high)


def _vector(one: gymnasium.Env[Any, Any], what: str, space: Any) -> Box:
    if isinstance(space, Box) and len(space.shape) == 1:
        return space
    raise UserError(
        f"the {what} space of {one.spec.id if one.spec else one} is {space}, but only vectors of numbers (Box of one "
        "axis) are supported; flatten it by one of Gymnasium's wrappers and register that."
    )


def _entries(name: str, chosen: Sequence[int], size: int) -> list[int]:
    entries = [int(entry) for entry in chosen]
    if not entries or len(set(entries)) < len(entries) or not all(0 <= entry < size for entry in entries):
        raise UserError(
            f"privileged {name!r} names the entries {entries} of an observation that has {size}, so they cannot be set "
            f"apart; give different ones from 0 to {size - 1}."
        )
    return entries
