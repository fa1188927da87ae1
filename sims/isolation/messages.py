"""What travels between an environment and its worker: observations and steps as flat dictionaries of arrays.

Arrays travel in shared memory between two processes of one machine, otherwise in the messages themselves.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from vla_rl.contract.env import PRIVILEGED, EnvSpec, Observation, Step, on_host
from vla_rl.contract.errors import ContractError

Arrays: TypeAlias = dict[str, np.ndarray]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape without ``E`` and dtype of arrays, by name."""

EXPERT_ACTION = PRIVILEGED + "expert_action"
OBS = "obs/"
PER_ACTION = ("reward", "valid", "executed", "intervened")  # arrays [E,H,...] of a Step
FLAGS = ("terminated", "truncated", "success")  # arrays [E] of a Step
_ALIGNMENT = 64  # bytes; a cache line
_KINDS = "biuf"  # of the arrays: booleans and numbers


def arrays_in(sent: Any) -> Arrays:
    """``sent`` of a message that holds its arrays itself; raises ContractError for anything else."""
    if not isinstance(sent, dict) or not all(isinstance(array, np.ndarray) for array in sent.values()):
        raise ContractError("a message holds something else than arrays, so it is dropped; look at its sender.")
    return sent


class SharedMemory:
    """Arrays between two processes of one machine: in files in memory that both map and no folder knows.

    Each side writes its own file, or in turn two of them, so that what was received last stays intact while the other
    side writes its next message.  A file grows with the largest message.  The message tells where each array lies.
    """

    def __init__(self, outbox: Sequence[int], inbox: Sequence[int]) -> None:
        """``outbox`` and ``inbox`` are descriptors of files that this side writes and reads; it owns them from now."""
        self._outbox, self._inbox = [_File(file) for file in outbox], [_File(file) for file in inbox]
        self._next = 0

    def put(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """What stands for ``arrays`` in the message; its receiver gives it to :meth:`get`."""
        number, self._next = self._next, (self._next + 1) % len(self._outbox)
        starts, end = {}, 0
        for name, array in arrays.items():
            if array.dtype.kind not in _KINDS:
                raise ContractError(f"{name!r} has dtype {array.dtype}, so it cannot be sent; send numbers.")
            starts[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        file = self._outbox[number]
        file.grow(end)
        for name, array in arrays.items():
            file.view(array.dtype, array.shape, starts[name])[...] = array
        return [number, [[name, array.dtype.str, list(array.shape), starts[name]] for name, array in arrays.items()]]

    def get(self, sent: Any) -> Arrays:
        """The arrays that the other side put; raises ContractError for what is none.

        They are overwritten by the other side's second message from now.
        """
        match sent:
            case [int(number), [*table]] if 0 <= number < len(self._inbox):
                return dict(_entry(self._inbox[number], item) for item in table)
        raise ContractError("a message does not say where its arrays lie, so it is dropped; look at its sender.")

    def close(self) -> None:
        for file in (*self._outbox, *self._inbox):
            file.close()


class _File:
    """A file in memory, mapped as far as it is needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0  # bytes that are mapped

    def grow(self, size: int) -> None:
        """Make room for ``size`` bytes."""
        if size > self._size:
            os.ftruncate(self._descriptor, size)

    def view(self, dtype: np.dtype[Any], shape: Sequence[int], start: int) -> np.ndarray:
        count = math.prod(shape)
        end = start + count * dtype.itemsize
        if not count:
            return np.empty(shape, dtype)
        if end > self._size:
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)  # arrays keep the map before it alive
        if self._map is None or not 0 <= start <= end <= self._size:
            raise ContractError(
                f"an array is said to end at byte {end} of a memory of {self._size}, so it is dropped; look at its "
                "sender."
            )
        return np.frombuffer(self._map, dtype, count, start).reshape(shape)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._map, self._size = -1, None, 0


def _entry(file: _File, item: Any) -> tuple[str, np.ndarray]:
    match item:
        case [str(name), str(dtype), [*shape], int(start)] if (
            dtype[1:2] in _KINDS and dtype[2:].isdigit() and all(type(size) is int and size >= 0 for size in shape)
        ):
            return name, file.view(np.dtype(dtype), shape, start)
    raise ContractError(f"a message describes an array as {item!r}, so it is dropped; look at its sender.")


def memory_file() -> int:
    """The descriptor of an empty file in memory without a name; of one without a name on the disk where that fails."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vla-rl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


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
