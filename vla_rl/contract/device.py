"""Environments that compute on a device: the host reads what it needs of a decision in one transfer.

A read makes the host wait until the device has computed everything before it, so it is made once, at the end of a
decision, for all that the host decides by: refused actions, ends, successes, rewards, whether all is finite.  Until
then the device decides: an action that is not finite stops every environment there, so nothing has moved when the host
learns of it.  Tensors are used by their methods alone, so nothing here needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import and_
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from vla_rl.contract.env import Array, Observation, Observe, OnHost, Step, on_host
from vla_rl.contract.rows import SUCCESS, EpisodeTracker
from vla_rl.contract.spec import EnvSpec

_FLAGS = ("reward", "valid", "terminated", "truncated", "success")

AdvanceThere: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array]]
"""Executes one ``action`` [E,D] where ``running`` bool [E], whose clocks ``time`` int64 [E] count it already.

All are tensors on the device.  Returns reward [E], and the codes of the causes of ends [E], 0 while an episode runs;
both are 0 where ``running`` is False, and those environments stay as they are.
"""


@dataclass(frozen=True)
class HostStep:
    """Copies on the host of what is decided by after a step; shapes and meanings as in ``Step``.

    finite  whether rewards, state and extras are all finite
    """

    reward: np.ndarray
    valid: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    finite: bool

    @property
    def done(self) -> np.ndarray:
        """bool [E]: environments that idle until they are reset."""
        ended: np.ndarray = self.terminated | self.truncated
        return ended


def read(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """``arrays`` as numpy, by one transfer for all tensors among them, which are on one device.

    They travel as float64: exact for booleans, floats and integers below 2^53.
    """
    found = {name: np.asarray(item) for name, item in arrays.items() if not is_tensor(item)}
    tensors = {name: item for name, item in arrays.items() if is_tensor(item)}
    if not tensors:
        return found
    packed, start = next(iter(tensors.values())).new_empty(sum(map(_size, tensors.values()))).double(), 0
    for item in tensors.values():
        packed[start : start + _size(item)] = item.reshape(-1)
        start += _size(item)
    values, start = on_host(packed), 0
    for name, item in tensors.items():
        part, start = values[start : start + _size(item)], start + _size(item)
        found[name] = part.astype(str(item.dtype).removeprefix("torch.")).reshape(item.shape)
    return found


def read_step(step: Step, before: Observation | None = None) -> HostStep:
    """What the host needs of ``step``, by one transfer at most; what the environment has read is not read again.

    ``before``: an observation of which ``finite`` speaks as well.
    """
    flags = {name: getattr(step, name) for name in _FLAGS}
    copies = {name: copy for name, array in flags.items() if (copy := step.on_host.copy_of(array)) is not None}
    unread = {name: array for name, array in flags.items() if name not in copies}
    arrays = [step.reward, *_floats(step.obs), *([] if before is None else _floats(before))]
    checked = [array for array in arrays if not step.on_host.has_checked(array)]
    here = [np.asarray(array) for array in checked if not is_tensor(array)]
    tensors = [array for array in checked if is_tensor(array)]
    if tensors:
        unread["finite"] = _all_finite(tensors)
    found = copies | read(unread)
    finite = bool(found.pop("finite", True)) and all(
        bool(np.isfinite(array).all()) for array in here if array.dtype.kind == "f"
    )
    return HostStep(**found, finite=finite)


class DeviceTracker(EpisodeTracker):
    """An ``EpisodeTracker`` of environments whose rules run on a device, with one transfer a decision."""

    def __init__(
        self,
        num_envs: int,
        place: Callable[[np.ndarray], Array],
        failures: tuple[str, ...] = (),
        cuts: tuple[str, ...] = (),
    ) -> None:
        """``place`` gives a copy of an array on the device, without waiting for it; the others as in the base class."""
        super().__init__(num_envs, failures, cuts)
        self._place = place
        self._bounds: tuple[Array, Array] | None = None
        self._begun: list[Array] = []  # tensors of the last reset's observation, which nobody has looked at yet

    def begun(self, obs: Observation) -> Observation:
        """``obs``, that of a reset: the next transfer tells whether it is finite."""
        self._begun = [array for array in _floats(obs) if is_tensor(array)]
        return obs

    def execute_there(
        self, chunk: Array, spec: EnvSpec, observe: Observe, advance: AdvanceThere, look: Callable[[Array], Observation]
    ) -> Step:
        """Execute ``chunk`` [E,H,D], a tensor or an array; see :meth:`execute`.

        ``look`` observes all environments, whose clocks are its argument.  The arrays of the result are tensors.
        """
        running, time = self._place(~self.done), self._place(self.time)
        action, refused = self.checked(chunk, spec, running)
        running = running & ~refused
        reward, valid = action.new_zeros(action.shape[:2]), running.new_zeros(action.shape[:2])
        cause = action.new_zeros(self.num_envs)  # an episode ends once, so a sum holds its code
        frames: list[Observation] = []
        for i in range(action.shape[1]):
            valid[:, i], time = running, time + running
            reward[:, i], ends = advance(action[:, i], running, time)
            cause, running = cause + ends, running & (ends == 0)
            if observe == "all":
                frames.append(look(time))
        obs = frames[-1] if frames else look(time)
        seen, self._begun = [reward, *filter(is_tensor, _floats(obs)), *self._begun], []
        host = read({"refused": refused, "cause": cause, "valid": valid, "reward": reward, "finite": _all_finite(seen)})
        if host["refused"]:
            self.chunk(on_host(chunk), spec)  # raises, and names what was refused
        self._latch(host["cause"].astype(np.int8), host["valid"])
        pairs = (reward, host["reward"]), (valid, host["valid"])
        return self.step_there(obs, pairs, action, frames, seen if host["finite"] else [])

    def checked(self, chunk: Array, spec: EnvSpec, running: Array) -> tuple[Array, Array]:
        """``chunk`` on the device, clipped; bool []: whether a ``running`` environment is given what is not finite.

        Raises ContractError for a wrong shape; what is not finite, :meth:`chunk` raises for.
        """
        given = chunk.detach().float() if is_tensor(chunk) else self._place(np.asarray(chunk, np.float32))
        self.require_shape(given.shape, spec)
        if self._bounds is None:
            low, high = (np.asarray(bound, np.float32) for bound in (spec.action.low, spec.action.high))
            self._bounds = self._place(low), self._place(high)
        there = given.to(running.device)
        refused = (~there.isfinite() & running[:, None, None]).any()
        return there.nan_to_num().maximum(self._bounds[0]).minimum(self._bounds[1]), refused

    def step_there(
        self,
        obs: Observation,
        reward_and_valid: tuple[tuple[Array, np.ndarray], tuple[Array, np.ndarray]],
        action: Array,
        frames: Sequence[Observation],
        finite: Sequence[Array],
    ) -> Step:
        """The Step after ``action`` [E,H,D]; reward and valid come with their copies on the host.

        ``finite``: what of it was found to be finite.
        """
        (reward, _), (valid, _) = reward_and_valid
        copies = {name: getattr(self, name).copy() for name in ("terminated", "truncated", "success")}
        flags = {name: self._place(copy) for name, copy in copies.items()}
        return Step(
            obs,
            reward,
            valid,
            **flags,
            cause=self.flags()["cause"],
            executed=action.masked_fill(~valid[..., None], 0),
            intervened=valid.new_zeros(valid.shape),
            frames=tuple(frames),
            on_host=OnHost((*reward_and_valid, *((flags[name], copies[name]) for name in flags)), tuple(finite)),
        )

    def _latch(self, cause: np.ndarray, valid: np.ndarray) -> None:
        """Count the clocks by ``valid`` bool [E,H], and latch the ends by their codes ``cause`` int8 [E]."""
        self.time += valid.sum(axis=1)
        ended = np.flatnonzero(cause)
        self.end(ended, cause[ended] == SUCCESS, cause[ended])


def _floats(obs: Observation) -> list[Array]:
    """What has to be finite."""
    return [obs.state, *obs.extras.values()]


def _all_finite(tensors: list[Array]) -> Array:
    """bool []: whether every entry of ``tensors`` is finite, on their device."""
    return reduce(and_, (tensor.isfinite().all() for tensor in tensors))


def is_tensor(array: Array) -> bool:
    """Whether ``array`` is a tensor, which may be on a device, and none of numpy."""
    return hasattr(array, "detach")


def _size(tensor: Array) -> int:
    return prod(tensor.shape)


def is_shard(item: object) -> TypeGuard[Any]:
    """Whether ``item`` is a ``DTensor``; where nobody has imported their module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(item, module.DTensor)
