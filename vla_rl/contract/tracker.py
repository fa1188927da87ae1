"""Bookkeeping and validation for vectorised environments without autoreset (numpy only).

Of environments that compute on a device the host reads what it needs of a decision in one transfer: a read makes it
wait until the device has computed everything before it.  Until then the device decides: an action that is not finite
stops every environment there, so nothing has moved when the host learns of it.  Tensors are used by their methods
alone, so nothing here needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from vla_rl.contract.env import Array, EnvSpec, Observation, Observe, OnHost, Snapshot, Step, on_host
from vla_rl.contract.errors import ContractError, NonFiniteError

SUCCESS, TIME_LIMIT, DIVERGED, FAILURES = 1, 2, 3, 4  # codes of causes; failures of a task count from FAILURES

Advance: TypeAlias = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Executes one ``action`` [R,D] in ``env_ids`` int [R], whose clocks count it already.

Returns reward [R], success bool [R], and the codes of the causes of ends int [R], 0 while an episode runs.
"""


class EpisodeTracker:
    """What an author of an environment needs besides the task: seeds, clocks, ends and the checks of arguments.

    In ``reset``: :meth:`index` and :meth:`seeds` check the arguments, :meth:`begin` starts the episodes.  In ``step``:
    :meth:`execute` does everything but an action of the task.  What is to be observed or ended otherwise checks and
    clips actions by :meth:`chunk`, latches ends by :meth:`end` and makes the Step by :meth:`step`.
    """

    def __init__(self, num_envs: int, failures: tuple[str, ...] = (), cuts: tuple[str, ...] = ()) -> None:
        """Causes beyond "success", "time_limit" and "diverged": ``failures`` terminate, ``cuts`` truncate."""
        self.causes = ("", "success", "time_limit", "diverged", *failures, *cuts)  # index 0: still running
        self._first_cut = FAILURES + len(failures)
        self.num_envs = num_envs
        self.time = np.zeros(num_envs, np.int64)
        self.seed = np.full(num_envs, -1, np.int64)  # -1: never reset
        self.cause = np.zeros(num_envs, np.int8)
        self.terminated, self.truncated, self.success = (np.zeros(num_envs, bool) for _ in range(3))

    @property
    def done(self) -> np.ndarray:
        """bool [E]: environments that idle."""
        return self.terminated | self.truncated

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays [E] of a snapshot."""
        names = ("seed", "time", "cause", "terminated", "truncated", "success")
        return {name: getattr(self, name) for name in names}

    def flags(self) -> dict[str, Any]:
        """Copies of the fields of a Step that say how episodes ended."""
        flags: dict[str, Any] = {name: getattr(self, name).copy() for name in ("terminated", "truncated", "success")}
        return flags | {"cause": tuple(np.array(self.causes, object)[self.cause].tolist())}

    def execute(
        self, chunk: Any, spec: EnvSpec, observe: Observe, advance: Advance, look: Callable[[], Observation]
    ) -> Step:
        """Execute ``chunk`` [E,H,D] by ``advance``, one action after the other, wherever an episode runs.

        ``look`` observes all environments; see ``VecEnv.step``.
        """
        action = self.chunk(chunk, spec)
        reward, valid = np.zeros(action.shape[:2], np.float32), np.zeros(action.shape[:2], bool)
        frames: list[Observation] = []
        for i in range(action.shape[1]):
            active = np.flatnonzero(~self.done)
            valid[active, i] = True
            self.time[active] += 1
            reward[active, i], success, cause = one_each(advance(active, action[active, i]), active.size)
            self.end(active, success, cause)
            if observe == "all":
                frames.append(look())
        return self.step(frames[-1] if frames else look(), reward, valid, action, frames)

    def step(
        self, obs: Observation, reward: Array, valid: np.ndarray, action: np.ndarray, frames: Sequence[Observation]
    ) -> Step:
        """The Step after ``action`` [E,H,D] without interventions; actions that are not valid count as not executed."""
        executed, intervened = np.where(valid[..., None], action, action.dtype.type(0)), np.zeros_like(valid)
        return Step(obs, reward, valid, **self.flags(), executed=executed, intervened=intervened, frames=tuple(frames))

    def begin(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        self.seed[env_ids], self.time[env_ids], self.cause[env_ids] = seeds, 0, 0
        self.terminated[env_ids] = self.truncated[env_ids] = self.success[env_ids] = False

    def end(self, env_ids: np.ndarray, success: np.ndarray, cause: np.ndarray) -> None:
        """Latch how the episodes of ``env_ids`` [R] ended: ``cause`` int [R] indexes ``causes``, 0 while one runs.

        The time limit, divergence and ``cuts`` truncate, every other cause terminates.
        """
        self.success[env_ids], self.cause[env_ids] = success, cause
        truncated = (cause == TIME_LIMIT) | (cause == DIVERGED) | (cause >= self._first_cut)
        self.truncated[env_ids], self.terminated[env_ids] = truncated, (cause > 0) & ~truncated

    def index(self, env_ids: Any) -> np.ndarray:
        """``env_ids`` as int [R]; raises ContractError unless they are distinct environments."""
        index = np.asarray(env_ids, np.intp).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_envs or np.unique(index).size != index.size):
            raise ContractError(
                f"env_ids {index.tolist()} are not distinct ones of {self.num_envs} environments, so nothing was done; "
                f"give each number once, from 0 to {self.num_envs - 1}."
            )
        return index

    def seeds(self, env_ids: np.ndarray, seeds: Any) -> np.ndarray:
        """``seeds`` as int64 [R]; raises ContractError unless each of ``env_ids`` has one of at least 0."""
        seed = np.asarray(seeds, np.int64)
        if seed.shape != env_ids.shape or (seed < 0).any():
            raise ContractError(
                f"reset of {env_ids.size} environments got seeds of shape {seed.shape}, lowest {seed.min(initial=0)}, "
                "so nothing was reset; give one seed of at least 0 for every environment."
            )
        return seed

    def require_started(self, env_ids: np.ndarray) -> None:
        """Raise ContractError when one of ``env_ids`` was never reset."""
        fresh = env_ids[self.seed[env_ids] < 0]
        if fresh.size:
            raise ContractError(
                f"environment {fresh[0]} was never reset, so it has no episode; call reset([{fresh[0]}], [seed]) first."
            )

    def require_shape(self, shape: Sequence[int], spec: EnvSpec) -> None:
        """Raise ContractError unless ``shape`` is that of a chunk and every environment was reset."""
        self.require_started(np.arange(self.num_envs))
        expected = (self.num_envs, spec.action_dim)
        if len(shape) != 3 or tuple(shape[::2]) != expected or not 1 <= shape[1] <= spec.max_chunk:
            raise ContractError(
                f"the action chunk has shape {tuple(shape)}, so nothing was executed; give "
                f"[{expected[0]},H,{expected[1]}] with 1 <= H <= {spec.max_chunk}."
            )

    def chunk(self, chunk: Any, spec: EnvSpec) -> np.ndarray:
        """``chunk`` [E,H,D] in the dtype of ``spec.action``, clipped to the bounds; raises before anything moves."""
        action = np.asarray(chunk, np.float32)
        self.require_shape(action.shape, spec)
        finite = np.isfinite(action)
        if not finite.all():
            self._require_idle(~finite, action)
            action = np.nan_to_num(action)
        if spec.discrete:
            self._require_indices(action)
        low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
        return np.minimum(np.maximum(action, low), high).astype(spec.action.dtype)

    def _require_indices(self, action: np.ndarray) -> None:
        """Raise ContractError when a running environment is given a fraction where indices are chosen from."""
        bad = np.argwhere((action != np.rint(action)) & ~self.done[:, None, None])
        if bad.size:
            env, step, entry = bad[0]
            raise ContractError(
                f"action[{env},{step},{entry}] is {action[env, step, entry]} but these actions are discrete, so "
                "nothing was executed; give whole numbers (vla_rl.policies.feed_forward chooses them)."
            )

    def _require_idle(self, wrong: np.ndarray, action: np.ndarray) -> None:
        """Raise NonFiniteError when an entry that is ``wrong`` [E,H,D] belongs to a running environment."""
        bad = np.argwhere(wrong & ~self.done[:, None, None])
        if bad.size:
            env, step, entry = bad[0]
            raise NonFiniteError(
                f"action[{env},{step},{entry}] is {action[env, step, entry]} (environment {env} at control step "
                f"{self.time[env] + step}), so nothing was executed; look for a diverged policy or normalisation."
            )


def one_each(advanced: Any, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What an ``Advance`` returned; raises ContractError unless three arrays have one entry for each of ``count``."""
    if isinstance(advanced, tuple) and len(advanced) == 3 and all(np.shape(it) in ((), (count,)) for it in advanced):
        reward, success, cause = advanced
        return reward, success, cause
    found = [list(np.shape(item)) for item in advanced] if isinstance(advanced, tuple) else type(advanced).__name__
    raise ContractError(
        f"_advance of {count} environments returned {found}, so nobody knows whose rewards and ends they are; return "
        f"three arrays of shape [{count}], an entry for each of env_ids."
    )


def select_rows(arrays: dict[str, np.ndarray], env_ids: np.ndarray) -> Snapshot:
    """Copies of the entries ``env_ids`` of every array."""
    return {name: array[env_ids] for name, array in arrays.items()}


def restore_rows(arrays: dict[str, np.ndarray], env_ids: np.ndarray, snapshot: Snapshot) -> None:
    """Write ``snapshot`` into ``env_ids``; raises ContractError, before anything is written, if it does not fit."""
    wrong = set(arrays) ^ set(snapshot)
    wrong |= {name for name in set(arrays) - wrong if snapshot[name].shape != (env_ids.size, *arrays[name].shape[1:])}
    if wrong:
        raise ContractError(
            f"the snapshot does not fit these {env_ids.size} environments in {sorted(wrong)}, so nothing was restored; "
            "take it from an environment with the same options, and give as many env_ids as it has entries."
        )
    for name, array in arrays.items():
        array[env_ids] = snapshot[name]


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
    sizes = [item.numel() for item in tensors.values()]
    ends = np.cumsum(sizes)
    packed = next(iter(tensors.values())).new_empty(sum(sizes)).double()
    for item, end, size in zip(tensors.values(), ends, sizes, strict=True):
        packed[end - size : end] = item.reshape(-1)
    for (name, item), part in zip(tensors.items(), np.split(on_host(packed), ends[:-1]), strict=True):
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
        self.time += host["valid"].sum(axis=1)
        ended = np.flatnonzero(host["cause"])
        codes = host["cause"][ended].astype(np.int8)
        self.end(ended, codes == SUCCESS, codes)
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


def _floats(obs: Observation) -> list[Array]:
    """What has to be finite."""
    return [obs.state, *obs.extras.values()]


def _all_finite(tensors: list[Array]) -> Array:
    """bool []: whether every entry of ``tensors`` is finite, on their device."""
    return reduce(and_, (tensor.isfinite().all() for tensor in tensors))


def is_tensor(array: Array) -> bool:
    """Whether ``array`` is a tensor, which may be on a device, and none of numpy."""
    return hasattr(array, "detach")


def is_shard(item: object) -> TypeGuard[Any]:
    """Whether ``item`` is a ``DTensor``; where nobody has imported their module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(item, module.DTensor)
