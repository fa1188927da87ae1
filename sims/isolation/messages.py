"""What travels between an environment and its worker: observations and steps as flat dictionaries of arrays.

Arrays travel in shared memory between two processes of one machine, otherwise in the messages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from vla_rl.contract.env import PRIVILEGED, EnvSpec, Observation, Step, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.wire import Arrays

Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape without ``E`` and dtype of arrays, by name."""

EXPERT_ACTION = PRIVILEGED + "expert_action"
OBS = "obs/"
PER_ACTION = ("reward", "valid", "executed", "intervened")  # arrays [E,H,...] of a Step
FLAGS = ("terminated", "truncated", "success")  # arrays [E] of a Step


def frame(number: int) -> str:
    """The prefix of the observation after action ``number`` of a chunk."""
    return f"frames/{number}/"


def observation_arrays(obs: Observation, prefix: str = OBS) -> Arrays:
    """The arrays of ``obs``, on the host, by names that begin with ``prefix``."""
    return {f"{prefix}{name}": on_host(array) for name, array in obs.arrays().items()}


def to_observation(arrays: Mapping[str, np.ndarray], prefix: str = OBS) -> Observation:
    """The observation whose arrays are in ``arrays`` by names that begin with ``prefix``; it shares their memory."""
    own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return Observation.of_arrays(own)


def step_arrays(step: Step) -> Arrays:
    """The arrays of ``step`` with those of its observation and frames."""
    found = {name: on_host(getattr(step, name)) for name in (*PER_ACTION, *FLAGS)}
    for number, obs in enumerate(step.frames):
        found |= observation_arrays(obs, frame(number))
    return found | observation_arrays(step.obs)


def observation_layout(spec: EnvSpec) -> Layout:
    """The arrays of an observation, by names without a prefix."""
    layout = {f"images/{name}": (image.shape, image.dtype) for name, image in spec.images.items()}
    layout |= {f"extras/{name}": (extra.shape, extra.dtype) for name, extra in spec.extras.items()}
    return layout | {"state": (spec.state.shape, spec.state.dtype), "task": ((), "int64"), "time": ((), "int64")}


def step_layout(spec: EnvSpec, horizon: int) -> Layout:
    """The arrays of a step of ``horizon`` actions besides its observations."""
    layout: Layout = {name: ((), "bool") for name in FLAGS}
    layout |= {name: ((horizon,), "bool") for name in ("valid", "intervened")}
    return layout | {"reward": ((horizon,), "float32"), "executed": ((horizon, *spec.action.shape), spec.action.dtype)}


def require_layout(arrays: Mapping[str, np.ndarray], layout: Layout, n: int) -> None:
    """Raise ContractError unless ``arrays`` holds what ``layout`` says, for ``n`` environments."""
    for name, (shape, dtype) in layout.items():
        array: Any = arrays.get(name)
        if array is None or array.shape != (n, *shape) or array.dtype != dtype:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise ContractError(
                f"{name!r} is {found} but {dtype}{[n, *shape]} is declared, so it would be misread; correct the spec "
                "or the environment."
            )
