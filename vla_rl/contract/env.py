"""The environment protocol, which simulators, imagined environments and robots implement alike, and its spec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from vla_rl.contract.errors import ContractError

# numpy.ndarray on the CPU, torch.Tensor on ``spec.device`` for environments that live on a GPU.
Array: TypeAlias = Any
Snapshot: TypeAlias = dict[str, Array]
Observe: TypeAlias = Literal["last", "all"]
PRIVILEGED = "privileged/"
# The cause of an episode that was truncated because its simulator's process died, hung or returned nonsense: nothing
# that the policy did, so an evaluation plays the seed again.
WORKER = "worker"


@dataclass(frozen=True)
class Observation:
    """The observations of ``E`` environments at one moment.

    images  {camera: uint8 [E,h,w,c]}  RGB
    state   float32 [E,S]              proprioception only
    task    int64 [E]                  index into ``spec.tasks``
    time    int64 [E]                  low-level actions executed since the reset
    extras  {name: [E,...]}            depth, force, ...; ``privileged/*`` never reaches a policy
    """

    images: Mapping[str, Array]
    state: Array
    task: Array
    time: Array
    extras: Mapping[str, Array] = field(default_factory=dict)

    def select(self, index: Array) -> Observation:
        """The observations of the environments in ``index`` (an integer or boolean index over ``E``)."""
        return Observation(
            {name: image[index] for name, image in self.images.items()},
            self.state[index],
            self.task[index],
            self.time[index],
            {name: extra[index] for name, extra in self.extras.items()},
        )

    def arrays(self) -> dict[str, Array]:
        """All arrays by name: ``images/CAMERA``, ``extras/NAME``, ``state``, ``task`` and ``time``."""
        found = {f"images/{name}": image for name, image in self.images.items()}
        found |= {f"extras/{name}": extra for name, extra in self.extras.items()}
        return found | {"state": self.state, "task": self.task, "time": self.time}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> Observation:
        """The observation whose :meth:`arrays` these are."""
        images, extras = (
            {name.removeprefix(kind): item for name, item in arrays.items() if name.startswith(kind)}
            for kind in ("images/", "extras/")
        )
        return cls(images, arrays["state"], arrays["task"], arrays["time"], extras)

    def public(self) -> Observation:
        """The same without ``privileged/*``: the part that policies receive."""
        if not any(name.startswith(PRIVILEGED) for name in self.extras):
            return self
        visible = {name: extra for name, extra in self.extras.items() if not name.startswith(PRIVILEGED)}
        return replace(self, extras=visible)


@dataclass(frozen=True)
class OnHost:
    """What an environment on a device has read of a step already, so that nobody waits for it again.

    copies  pairs of an array of the step and its copy on the host
    finite  arrays of the step all of whose entries are finite

    Arrays are recognised by identity: what was replaced in a step is not known.
    """

    copies: tuple[tuple[Array, np.ndarray], ...] = ()
    finite: tuple[Array, ...] = ()

    def copy_of(self, array: Array) -> np.ndarray | None:
        return next((copy for own, copy in self.copies if own is array), None)

    def has_checked(self, array: Array) -> bool:
        """Whether ``array`` was found to be finite."""
        return any(own is array for own in self.finite)


@dataclass(frozen=True)
class Step:
    """The result of executing one chunk.

    obs         the observation after the chunk; after the end of an episode its last observation, until the reset
    reward      float32 [E,H]   per low-level action, 0 where not valid
    valid       bool [E,H]      False after the end inside a chunk, and everywhere for idle environments
    terminated  bool [E]        ended by the task (success at the time limit included); stays True until the reset
    truncated   bool [E]        ended from outside the task (time limit, uncertainty); never with terminated; stays True
    cause       [E] of str      why the episode ended: "success", "time_limit", ...; "" while it runs
    success     bool [E]        latched, see ``spec.success``; always False where that is None
    executed    float32 [E,H,D] actions after clipping and safety, 0 where not valid
    intervened  bool [E,H]      a person acted instead of the policy
    frames      with observe="all": the ``H`` observations after each action; after an end the last one repeats
    on_host     what the host knows already of arrays that are on a device
    """

    obs: Observation
    reward: Array
    valid: Array
    terminated: Array
    truncated: Array
    cause: Sequence[str]
    success: Array
    executed: Array
    intervened: Array
    frames: tuple[Observation, ...] = ()
    on_host: OnHost = OnHost()

    @property
    def done(self) -> Array:
        """bool [E]: environments that idle until they are reset."""
        return self.terminated | self.truncated

    def mapped(self, change: Callable[[Array], Array]) -> Step:
        """The same with ``change`` applied to every array except those of observations."""
        names = ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened")
        return replace(self, **{name: change(getattr(self, name)) for name in names})


@runtime_checkable
class VecEnv(Protocol):
    """``E`` environments stepped together, without autoreset.

    An environment whose episode ended idles: ``obs`` stays its last observation and further steps leave it untouched
    with ``valid=False`` until ``reset(env_ids, seeds)``.  So the caller chooses every seed.
    """

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def num_envs(self) -> int: ...

    def reset(self, env_ids: Array, seeds: Array) -> Observation:
        """Start episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R]); returns the observation of all ``E``."""

    def step(self, chunk: Array, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in physical units, any 1 <= H <= ``spec.max_chunk``.

        Raises ContractError for a wrong shape and NonFiniteError for a NaN in a running environment, before anything
        moves.
        """

    def close(self) -> None:
        """Free all resources; safe to call twice."""


@runtime_checkable
class AsyncSteps(Protocol):
    """Environments that compute in other processes: :meth:`step_async` and :meth:`step_wait` are ``step`` in halves.

    The caller can step other environments in between.  Any other call in between gives the step up, and with it the
    episodes that were running.
    """

    def step_async(self, chunk: Array, observe: Observe = "last") -> None:
        """Begin to execute ``chunk`` [E,H,D] and return at once; raises what ``VecEnv.step`` raises."""

    def step_wait(self) -> Step:
        """The step that :meth:`step_async` has begun."""


@runtime_checkable
class Snapshots(Protocol):
    """Environments that can be saved and restored in mid-episode (branching, checkpoints)."""

    def snapshot(self, env_ids: Array) -> Snapshot:
        """Everything that the future of ``env_ids`` depends on, as arrays with a leading axis [R]."""

    def restore(self, env_ids: Array, snapshot: Snapshot) -> Observation:
        """Restore ``env_ids`` from ``snapshot``, bit for bit; returns the observation of all ``E``."""


def on_host(array: Array) -> np.ndarray:
    """``array`` as numpy, from whatever device; shares the memory of an array on the host."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)


def to_env(action: Array, env: VecEnv) -> Array:
    """A policy's actions in the form that ``env`` takes: numpy on the CPU, otherwise tensors on its device.

    Numpy actions, of a scripted expert for instance, stay as they are: every environment takes them.
    """
    host = env.spec.device == "cpu" or not hasattr(action, "to")
    return on_host(action) if host else action.to(env.spec.device)


MOST_NUMBERS = 1 << 26  # in one step of one environment


@dataclass(frozen=True)
class ArraySpec:
    """One array of the contract, without its leading ``E`` axis.

    ``low`` and ``high`` are inclusive bounds in ``unit`` (one number for all entries, or one per entry of the last
    axis); ``frame`` names the coordinate frame or camera; ``names`` labels the entries of the last axis.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    unit: str = ""
    frame: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvSpec:
    """All that a policy, a rollout or an evaluation may assume about an environment.

    ``state`` is proprioception only.  ``extras`` whose name starts with ``privileged/`` are for critics and rewards and
    never reach a policy.  ``tasks`` is a table of instructions that only grows; an observation carries an index into
    it.  ``families`` names the kind of each task ("lift", "place"), so that success can be reported by kind; it is
    empty when there is one kind.  ``control_dt`` is in seconds per low-level action, ``time_limit`` in such actions per
    episode.  ``action`` of dtype float32 is continuous; of dtype int64 it is discrete, every entry an index from its
    low to its high.  ``success``: "once" if one moment of success suffices, "at_end" if only the last moment counts,
    None if the environment has no notion of success; ``Step.success`` is then always False and returns are compared
    instead.  ``profile`` says how exactly an episode follows from its seed and actions: "bitwise", "tolerant" (physics
    on a GPU), or "hardware" (a robot, which no check moves); see ``vla_rl.contract.check``.
    """

    name: str
    images: dict[str, ArraySpec]
    state: ArraySpec
    action: ArraySpec
    tasks: tuple[str, ...]
    control_dt: float
    time_limit: int
    max_chunk: int
    extras: dict[str, ArraySpec] = field(default_factory=dict)
    success: Literal["once", "at_end"] | None = "once"
    device: str = "cpu"
    can_snapshot: bool = False
    families: tuple[str, ...] = ()
    profile: str = "bitwise"

    @property
    def action_dim(self) -> int:
        """``D``: entries of one low-level action."""
        return self.action.shape[0]

    @property
    def discrete(self) -> bool:
        """Whether actions are indices instead of physical quantities."""
        return self.action.dtype == "int64"

    def family(self, task: int) -> str:
        """The kind of task of the instruction with index ``task``."""
        return self.families[task] if task < len(self.families) else self.name

    def zeros(self, num_envs: int) -> Observation:
        """An observation [E,...] of zeros, after a reset: dark pictures and the first task."""

        def of(arrays: Mapping[str, ArraySpec]) -> dict[str, np.ndarray]:
            return {name: np.zeros((num_envs, *item.shape), item.dtype) for name, item in arrays.items()}

        task, time = np.zeros((2, num_envs), np.int64)
        state = np.zeros((num_envs, *self.state.shape), self.state.dtype)
        return Observation(of(self.images), state, task, time, of(self.extras))

    def to_json(self) -> dict[str, Any]:
        """A dict for JSON, from which :meth:`from_json` rebuilds an equal spec."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        """Rebuild a spec; raises ContractError when a field is missing, unknown or something else."""
        try:
            fields = dict(data)
            fields["images"] = {name: _array_spec(item) for name, item in data["images"].items()}
            fields["extras"] = {name: _array_spec(item) for name, item in data.get("extras", {}).items()}
            fields["state"], fields["action"] = _array_spec(data["state"]), _array_spec(data["action"])
            fields["tasks"], fields["families"] = tuple(data["tasks"]), tuple(data.get("families", ()))
            spec = cls(**fields)
            for name in ("control_dt", "time_limit", "max_chunk"):
                if not isinstance(getattr(spec, name), Real):
                    raise TypeError(f"its {name} is {getattr(spec, name)!r}")
            parts = (*spec.images.values(), *spec.extras.values(), spec.state, spec.action)
            if (numbers := sum(math.prod(part.shape) for part in parts)) > MOST_NUMBERS:
                raise ValueError(f"its arrays have {numbers:,} numbers, at most {MOST_NUMBERS:,} are taken")
            return spec
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ContractError(
                f"the environment spec cannot be read ({error}), so nothing can be checked against it; "
                "write it again with this version of vla-rl."
            ) from error


def _array_spec(data: dict[str, Any]) -> ArraySpec:
    fields = dict(data)
    fields |= {key: tuple(data[key]) for key in ("shape", "names") if key in data}
    fields |= {key: tuple(data[key]) for key in ("low", "high") if isinstance(data[key], list | tuple)}
    if not all(isinstance(side, Integral) and int(side) >= 0 for side in fields["shape"]):
        raise TypeError(f"a shape is {str(data['shape'])[:80]}")
    return ArraySpec(**fields)
