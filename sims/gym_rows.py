"""``E`` Gymnasium environments that are reset one at a time: single ones, or one of Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from vla_rl.contract.errors import UserError

Result: TypeAlias = tuple[Any, float, bool, bool]  # observation, reward, terminated, truncated


@dataclass(frozen=True)
class Facts:
    """What the environments of one id have in common; ``time_limit`` is None where Gymnasium's registry has none."""

    name: str
    observation_space: Space[Any]
    action_space: Space[Any]
    control_dt: float
    time_limit: int | None


class Rows(Protocol):
    """``E`` environments.  One whose episode ended is neither stepped nor looked at until it is reset."""

    facts: Facts

    @property
    def num_envs(self) -> int: ...

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Start episodes; returns the first observation of each."""

    def step(self, env_ids: Sequence[int], actions: Sequence[Any]) -> list[Result]:
        """Execute one action in each of ``env_ids``."""

    def close(self) -> None: ...


class SingleRows:
    """Single environments, stepped one after the other; an ended one is left alone."""

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any] | FirstRow]) -> None:
        """``envs`` are equal and owned by this object."""
        self._envs = envs
        self.facts = _facts(envs[0], envs[0].observation_space, envs[0].action_space)

    @property
    def num_envs(self) -> int:
        return len(self._envs)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        return [self._envs[env_id].reset(seed=seed)[0] for env_id, seed in zip(env_ids, seeds, strict=True)]

    def step(self, env_ids: Sequence[int], actions: Sequence[Any]) -> list[Result]:
        results = [self._envs[env_id].step(action) for env_id, action in zip(env_ids, actions, strict=True)]
        return [(obs, float(reward), bool(ended), bool(cut)) for obs, reward, ended, cut, _ in results]

    def close(self) -> None:
        for env in self._envs:
            env.close()


class VectorRows:
    """A Gymnasium vector environment in any autoreset mode, reset row by row through ``options["reset_mask"]``.

    A row whose episode ended keeps running inside the vector environment, because a vector environment steps all of
    its rows; what it does there is thrown away, and the next reset gives it a seed of its own.

        NextStep   the row's next step restarts it
        SameStep   it has restarted already, and its last observation is ``infos["final_obs"]``
        Disabled   it has to be restarted before the next step
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Owns ``env``; raises UserError when it cannot reset one row alone."""
        self._env = env
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._ended = np.zeros(env.num_envs, bool)
        self.facts = _facts(env, env.single_observation_space, env.single_action_space)
        if env.num_envs > 1:
            self._require_reset_of_one_row()

    @property
    def num_envs(self) -> int:
        return int(self._env.num_envs)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        mask = np.zeros(self.num_envs, bool)
        mask[list(env_ids)] = True
        by_row = dict(zip(env_ids, seeds, strict=True))
        self._ended[mask] = False
        obs = self._rows(self._reset(mask, [by_row.get(i) for i in range(self.num_envs)]))
        return [obs[env_id] for env_id in env_ids]

    def step(self, env_ids: Sequence[int], actions: Sequence[Any]) -> list[Result]:
        if not len(env_ids):
            return []
        if self._mode == AutoresetMode.DISABLED and self._ended.any():
            self._reset(self._ended.copy(), [None] * self.num_envs)
            self._ended[:] = False
        by_row = dict(zip(env_ids, actions, strict=True))
        full = [by_row.get(i, actions[0]) for i in range(self.num_envs)]
        batch = _batch(self._env.single_action_space, full)
        obs, reward, terminated, truncated, infos = self._env.step(batch)
        self._ended |= terminated | truncated
        last = self._rows(obs)
        if self._mode == AutoresetMode.SAME_STEP:
            for i in np.flatnonzero(terminated | truncated):
                last[i] = infos["final_obs"][i]
        return [(last[i], float(reward[i]), bool(terminated[i]), bool(truncated[i])) for i in env_ids]

    def close(self) -> None:
        self._env.close()

    def _rows(self, obs: Any) -> list[Any]:
        return list(iterate(self._env.observation_space, obs))

    def _reset(self, mask: np.ndarray, seeds: list[int | None]) -> Any:
        """All observations after a reset of ``mask`` bool [E]; a reset of every row needs no mask."""
        options = None if mask.all() else {"reset_mask": mask}
        return self._env.reset(seed=seeds, options=options)[0]  # type: ignore[arg-type]  # Sync and Async take lists

    def _require_reset_of_one_row(self) -> None:
        mask = np.arange(self.num_envs) == 0
        try:
            self._reset(np.ones_like(mask), list(range(self.num_envs)))
            before = self._rows(self._env.step(self._env.action_space.sample())[0])[1]
            kept = _equal(before, self._rows(self._reset(mask, [7] + [None] * (self.num_envs - 1)))[1])
        except (gymnasium.error.Error, TypeError, ValueError, AttributeError):
            kept = False
        if not kept:
            raise UserError(
                f"{self.facts.name!r} as {type(self._env.unwrapped).__name__} resets all of its environments at once, "
                "so no episode could start with a seed of its own; leave vectorization_mode out, or use 'sync' or "
                "'async'."
            )


class FirstRow:
    """A vector environment of one row as a single one, for ids that have no other form."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env = env
        self._same_step = env.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.spec, self.metadata, self.unwrapped = env.spec, env.metadata, env.unwrapped

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        obs, infos = self._env.reset(seed=seed)
        return self._first(obs), infos

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, infos = self._env.step(_batch(self.action_space, [action]))
        ended = bool(terminated[0] or truncated[0])
        last = infos["final_obs"][0] if ended and self._same_step else self._first(obs)
        return last, float(reward[0]), bool(terminated[0]), bool(truncated[0]), infos

    def close(self) -> None:
        self._env.close()

    def _first(self, obs: Any) -> Any:
        return next(iter(iterate(self._env.observation_space, obs)))


def _facts(env: Any, observation_space: Space[Any], action_space: Space[Any]) -> Facts:
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    registered = env.spec and (env.spec.kwargs.get("max_episode_steps") or env.spec.max_episode_steps)
    per_second = env.metadata.get("render_fps") or 1
    control_dt = float(getattr(env.unwrapped, "dt", 1 / per_second))
    return Facts(name, observation_space, action_space, control_dt, registered or None)


def _batch(space: Space[Any], items: Sequence[Any]) -> Any:
    """``items`` of ``space`` as a vector environment takes them."""
    empty: Any = create_empty_array(space, len(items))
    return concatenate(space, items, empty)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool(np.array_equal(one, other))
