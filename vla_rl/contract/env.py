"""The environment protocol, which simulators, imagined environments and robots implement alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from vla_rl.contract.spec import EnvSpec

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
        """The copy of ``array``, None if it was not read."""
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
