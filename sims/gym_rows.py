"""``E`` Gymnasium environments that are reset one at a time: single ones, or one of Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Space
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError, UserError, cause_of

Result: TypeAlias = tuple[Any, float, bool, bool, Mapping[str, Any]]
"""observation, reward, terminated, truncated, and what ``info`` says under ``SUCCESS_KEYS`` and the user's own key."""
SUCCESS_KEYS = ("is_success", "success")  # Gymnasium-Robotics, panda-gym, PushT, Aloha; ManiSkill, Meta-World


@dataclass(frozen=True)
class Facts:
    """What the environments of one id have in common; ``time_limit`` is None where Gymnasium's registry has none."""

    name: str
    observation_space: Space[Any]
    action_space: Space[Any]
    control_dt: float
    time_limit: int | None


class SingleRows:
    """Single environments, stepped one after the other.

    ``keys`` are the entries of ``info`` that results hold.  An environment whose episode ended is neither stepped nor
    looked at until it is reset.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any] | FirstRow]) -> None:
        """``envs`` are equal and owned by this object."""
        self.keys: tuple[str, ...] = SUCCESS_KEYS
        self.facts = _facts(envs[0], envs[0].observation_space, envs[0].action_space)
        self._envs = [_without_bookkeeping(env) for env in envs]

    @property
    def num_envs(self) -> int:
        return len(self._envs)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        name = self.facts.name
        with naming(name, "reset"):
            return [
                begun(name, self._envs[env_id].reset(seed=seed))[0] for env_id, seed in zip(env_ids, seeds, strict=True)
            ]

    def step(self, env_ids: Sequence[int], actions: Sequence[Any]) -> list[Result]:
        results, name = [], self.facts.name
        with naming(name, "step"):
            for env_id, action in zip(env_ids, actions, strict=True):
                *rest, info = stepped(name, self._envs[env_id].step(action))
                results.append((*rest, {key: info[key] for key in self.keys if key in info}))
        return results

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
        self.keys: tuple[str, ...] | None = SUCCESS_KEYS  # None: all that there are
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
        name = self.facts.name
        with naming(name, "step"):
            obs, reward, terminated, truncated, infos = self._env.step(batch)
        rewards, ends, cuts = (
            _of_rows(name, *item, self.num_envs)
            for item in (("rewards", reward), ("terminated", terminated), ("truncated", truncated))
        )
        self._ended |= (ends | cuts).astype(bool)
        last, said = self._rows(obs), [infos] * self.num_envs
        if self._mode == AutoresetMode.SAME_STEP:
            for i in np.flatnonzero(ends | cuts):
                last[i], said[i] = _final(name, infos, int(i), obs)
        return [
            (
                last[i],
                number(name, "reward", rewards[i]),
                flag(name, "terminated", ends[i]),
                flag(name, "truncated", cuts[i]),
                self._info(said[i], i),
            )
            for i in env_ids
        ]

    def close(self) -> None:
        self._env.close()

    def _info(self, infos: Mapping[str, Any], row: int) -> dict[str, Any]:
        """What ``infos`` say of ``row`` under ``keys``."""
        keys = infos if self.keys is None else self.keys
        return {key: value for key in keys if (value := _of_info(infos, key, row)) is not None}

    def _rows(self, obs: Any) -> list[Any]:
        return list(iterate(self._env.observation_space, obs))

    def _reset(self, mask: np.ndarray, seeds: list[int | None]) -> Any:
        """All observations after a reset of ``mask`` bool [E]; a reset of every row needs no mask."""
        options = None if mask.all() else {"reset_mask": mask}
        given: Any = seeds if self.num_envs > 1 else seeds[0]  # Sync and Async take lists, every kind a number
        with naming(self.facts.name, "reset"):
            return begun(self.facts.name, self._env.reset(seed=given, options=options))[0]

    def _require_reset_of_one_row(self) -> None:
        mask = np.arange(self.num_envs) == 0
        try:
            self._reset(np.ones_like(mask), list(range(self.num_envs)))
            before = self._rows(self._env.step(self._env.action_space.sample())[0])[1]
            later = self._rows(self._reset(mask, [7] + [None] * (self.num_envs - 1)))[1]
            kept = data_equivalence(before, later, exact=True)
        except (gymnasium.error.Error, TypeError, ValueError, AttributeError, UserError):
            kept = False
        if not kept:
            raise UserError(
                f"{self.facts.name!r} as {type(self._env.unwrapped).__name__} resets all of its environments at once, "
                "so no episode could start with a seed of its own; leave vectorization_mode out, or use 'sync' or "
                "'async'."
            )


Rows: TypeAlias = SingleRows | VectorRows
"""``E`` environments: ``reset`` gives first observations, ``step`` executes an action in each of ``env_ids``."""


class FirstRow:
    """A vector environment of one row as a single one, for ids that have no other form."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._rows = VectorRows(env)
        self._rows.keys = None
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.spec, self.metadata, self.unwrapped = env.spec, env.metadata, env.unwrapped

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        return self._rows.reset([0], [seed])[0], {}

    def step(self, action: Any) -> Result:
        return self._rows.step([0], [action])[0]

    def close(self) -> None:
        self._rows.close()


# -- what environments of others say -----------------------------------------------------------------------------------


@contextmanager
def naming(name: str, what: str) -> Iterator[None]:
    """Whatever ``what`` of environment ``name`` raises becomes one sentence that carries its cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of code that is not ours
        raise ContractError(
            f"{what} of environment {name!r} failed ({cause_of(error)}), so its episode cannot go on; correct the "
            "environment."
        ) from error


def begun(name: str, outcome: Any) -> tuple[Any, dict[str, Any]]:
    """What a reset returned, observation (a copy) and info; raises ContractError for anything else."""
    match outcome:
        case (obs, (Mapping() | None) as info):
            return copied(obs), dict(info or {})
    raise ContractError(
        f"reset of environment {name!r} returned {_kinds(outcome)} instead of an observation and a dict, so no episode "
        "begins; return (obs, info), as Gymnasium has it since 0.26."
    )


def stepped(name: str, outcome: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """What a step returned, the observation as a copy, numbers and flags as Python's own, the info as it is.

    Rewards may be arrays or tensors of one entry, flags as well.  Raises ContractError for anything else.
    """
    match outcome:
        case (obs, reward, ended, cut, (Mapping() | None) as info):
            flags = flag(name, "terminated", ended), flag(name, "truncated", cut)
            return copied(obs), number(name, "reward", reward), *flags, {} if info is None else info
    raise ContractError(
        f"step of environment {name!r} returned {_kinds(outcome)} instead of observation, reward, terminated, "
        "truncated and a dict, so nothing can be learnt from it; return these five, as Gymnasium has it since 0.26."
    )


def number(name: str, what: str, value: Any) -> float:
    """``value`` as a number, also of an array or tensor of one entry; raises ContractError for anything else."""
    if isinstance(value, float):  # numpy's too
        return float(value)
    try:
        if not isinstance(value, str | bytes):
            return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        pass  # said below
    raise ContractError(
        f"environment {name!r} returned a {what} that is {_kind(value)}, so nothing can be learnt from it; return one "
        "number."
    )


def flag(name: str, what: str, value: Any) -> bool:
    """``value`` as true or false, also 0, 1 and arrays of one entry; raises ContractError for anything else."""
    if value is True or value is False:
        return value
    found = number(name, what, value)
    if found not in (0.0, 1.0):
        raise ContractError(
            f"environment {name!r} returned {what} as {found:g}, which is neither true nor false, so nobody knows "
            "what it means; return a bool."
        )
    return bool(found)


def copied(obs: Any) -> Any:
    """``obs`` in memory of its own: environments may hand out one buffer again and again."""
    if isinstance(obs, np.ndarray):
        return obs.copy()
    if isinstance(obs, Mapping):
        return {key: copied(part) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map(copied, obs))
    return np.array(on_host(obs)) if hasattr(obs, "detach") else obs


def _of_rows(name: str, what: str, values: Any, num_envs: int) -> np.ndarray:
    """``values`` [E] of a vector environment; raises ContractError for another shape."""
    found = on_host(values)
    if found.shape == (num_envs, 1):
        found = found[:, 0]
    if found.shape != (num_envs,):
        raise ContractError(
            f"environment {name!r} returned {what} of shape {list(found.shape)} for {num_envs} environments, so nobody "
            "knows whose they are; return one for each."
        )
    return found


def _final(name: str, infos: Mapping[str, Any], row: int, obs: Any) -> tuple[Any, dict[str, Any]]:
    """The last observation and info of an episode whose row has restarted already."""
    last = infos.get("final_obs", infos.get("final_observation"))  # the older name is that of Gymnasium 0.29
    if last is None or last[row] is None:
        raise ContractError(
            f"environment {name!r} restarts episodes in the step that ends them and gives no final_obs, so the last "
            'observation is lost; add infos["final_obs"], or use another autoreset mode.'
        )
    if _overlaps(last[row], obs):
        raise ContractError(
            f"environment {name!r} restarts episodes in the step that ends them and gives as final_obs the memory of "
            "the new observation, so the last one is overwritten; give a copy of it."
        )
    said = infos.get("final_info", {})
    return last[row], dict(said if isinstance(said, Mapping) else said[row] or {})


def _of_info(infos: Mapping[str, Any], key: str, row: int) -> Any:
    """Entry ``key`` of a vector environment's infos for ``row``; None where it says nothing about that row."""
    value, given = infos.get(key), infos.get(f"_{key}")
    if value is None or (given is not None and not given[row]):
        return None
    return value[row] if np.ndim(value) else value


def _overlaps(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return any(_overlaps(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return any(map(_overlaps, one, other))
    return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.shares_memory(one, other)


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    what = "None" if value is None else f"a {type(value).__name__}"
    return what if shape is None else f"{what} of shape {list(shape)}"


def _kinds(outcome: Any) -> str:
    return f"({', '.join(map(_kind, outcome))})" if isinstance(outcome, tuple) else _kind(outcome)


def _facts(env: Any, observation_space: Space[Any], action_space: Space[Any]) -> Facts:
    name = name_of(env)
    registered = env.spec and (env.spec.kwargs.get("max_episode_steps") or env.spec.max_episode_steps)
    per_second = env.metadata.get("render_fps") or 1
    control_dt = float(getattr(env.unwrapped, "dt", 1 / per_second))
    return Facts(name, observation_space, action_space, control_dt, registered or None)


def _without_bookkeeping(env: Any) -> Any:
    """``env`` without Gymnasium's outermost wrappers for what ``GymEnv`` does itself: time limit and order."""
    while type(env) in (TimeLimit, OrderEnforcing):
        env = env.env
    return env


def name_of(env: Any) -> str:
    """The id of ``env``; the name of its class where it has none."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def _batch(space: Space[Any], items: Sequence[Any]) -> Any:
    """``items`` of ``space`` as a vector environment takes them."""
    empty: Any = create_empty_array(space, len(items))
    return concatenate(space, items, empty)
