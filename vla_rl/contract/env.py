"""The environment protocol: simulators, imagined worlds and robots all look like this to a learner."""

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


@dataclass(frozen=True)
class Observation:
    """What is seen at one moment by ``E`` environments.

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
        """The observation of the chosen rows (an integer or boolean index over ``E``)."""
        return Observation(
            {name: image[index] for name, image in self.images.items()},
            self.state[index],
            self.task[index],
            self.time[index],
            {name: extra[index] for name, extra in self.extras.items()},
        )

    def public(self) -> Observation:
        """The same without ``privileged/*``: what a policy is given."""
        if not any(name.startswith(PRIVILEGED) for name in self.extras):
            return self
        shown = {name: extra for name, extra in self.extras.items() if not name.startswith(PRIVILEGED)}
        return replace(self, extras=shown)


@dataclass(frozen=True)
class Step:
    """What happened while a chunk was executed.

    obs         the observation after the chunk; for a row that ended, its last observation until it is reset
    reward      float32 [E,H]   per low-level action, 0 where not valid
    valid       bool [E,H]      False after the end inside a chunk, and everywhere for idle rows
    terminated  bool [E]        ended by the task (success at the time limit included); stays True while the row idles
    truncated   bool [E]        ended by something outside the task (time limit, uncertainty); exclusive, stays True
    cause       [E] of str      why the row ended: "success", "time_limit", ...; "" while it runs
    success     bool [E]        latched, see ``spec.success``
    executed    float32 [E,H,D] actions after clipping and safety, 0 where not valid
    intervened  bool [E,H]      a person acted instead of the policy
    frames      with observe="all": the ``H`` observations after each action; a row's repeat its last one once it ended
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

    @property
    def done(self) -> Array:
        """bool [E]: rows that idle until they are reset."""
        return self.terminated | self.truncated

    def mapped(self, change: Callable[[Array], Array]) -> Step:
        """The same with ``change`` made to every array but those of observations."""
        names = ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened")
        return replace(self, **{name: change(getattr(self, name)) for name in names})


@runtime_checkable
class VecEnv(Protocol):
    """``E`` environments stepped together, without autoreset.

    A row whose episode ended idles: ``obs`` stays its last observation and further steps leave it untouched with
    ``valid=False`` until ``reset(rows, seeds)``.  So whoever steps the environment chooses every seed.
    """

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def num_envs(self) -> int: ...

    def reset(self, rows: Array, seeds: Array) -> Observation:
        """Start new episodes in ``rows`` (int [R]) with ``seeds`` (int [R]); returns the observation of all rows."""

    def step(self, chunk: Array, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in physical units, any 1 <= H <= ``spec.max_chunk``.

        Raises ContractError for a wrong shape and NonFiniteError for a NaN in an active row; nothing has moved then.
        """

    def close(self) -> None:
        """Free what the environment holds; safe to call twice."""


@runtime_checkable
class Snapshots(Protocol):
    """Environments whose rows can be saved and put back in mid-episode (branching, checkpoints)."""

    def snapshot(self, rows: Array) -> Snapshot:
        """Everything that the future of ``rows`` depends on, as arrays with a leading axis [R]."""

    def restore(self, rows: Array, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``rows``: the continuation repeats bit for bit. Returns the observation of all rows."""


def on_host(array: Array) -> np.ndarray:
    """``array`` as numpy, wherever it is; shares memory with one that is on the host."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)


def to_env(action: Array, env: VecEnv) -> Array:
    """Actions of a policy as ``env`` takes them: numpy on the CPU, tensors on its device otherwise."""
    return on_host(action) if env.spec.device == "cpu" else action.to(env.spec.device)
