"""Gymnasium's environments by their ids: single ones, or one of its vector environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from sims.gym_rows import FirstRow, begun, copied, name_of, naming, stepped
from vla_rl.contract.load import load


def registered(id: str) -> str:
    """``id`` without the "module:" that registers it, which is imported, also from the working folder."""
    module, _, name = id.rpartition(":")
    if module:
        load(f"{module}:__name__")
    return name


def single_maker(
    id: str, options: Mapping[str, Any], around: Sequence[Callable[..., Any]]
) -> Callable[[], gymnasium.Env[Any, Any] | FirstRow]:
    """A function that makes one environment, where the id has no other form by a vector environment of one row."""

    def vector_of_one() -> FirstRow:
        return FirstRow(gymnasium.make_vec(id, 1, "vector_entry_point", wrappers=around, **options))

    def single() -> gymnasium.Env[Any, Any]:
        env: Any = gymnasium.make(id, disable_env_checker=True, **options)
        for wrapper in around:
            env = wrapper(env)
        return env

    return vector_of_one if gymnasium.spec(id).entry_point is None else single


def make_vector(
    id: str,
    num_envs: int,
    mode: str,
    options: Mapping[str, Any],
    around: Sequence[Callable[..., Any]],
    vector_kwargs: Mapping[str, Any],
) -> Any:
    """Gymnasium's vector environment.

    Its own kinds restart an ended row at once (SameStep) unless ``vector_kwargs`` says otherwise: in "async" without
    shared memory, NextStep would restart a row twice.
    """
    if mode == "vector_entry_point":
        return gymnasium.make_vec(id, num_envs, mode, dict(vector_kwargs), wrappers=around, **options)
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, **vector_kwargs}
    plain = [*around, Plain]
    return gymnasium.make_vec(id, num_envs, mode, kwargs, wrappers=plain, disable_env_checker=True, **options)


class Plain(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What an environment returns, checked, in Python's own numbers and in memory of its own.

    Gymnasium's vector environments keep the last observation of an episode while they restart it, which overwrites the
    buffer of an environment that hands out one again and again.
    """

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        name = name_of(self)
        with naming(name, "reset"):
            obs, info = begun(name, self.env.reset(**options))
        return obs, copied(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        name = name_of(self)
        with naming(name, "step"):
            *rest, info = stepped(name, self.env.step(action))
        return (*rest, copied(info))
