"""Bookkeeping and validation for vectorised environments without autoreset (numpy only)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import numpy as np

from vla_rl.contract.env import Array, Observation, Observe, Snapshot, Step
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.spec import EnvSpec

SUCCESS, TIME_LIMIT, DIVERGED, FAILURES = 1, 2, 3, 4  # codes of causes; failures of a task count from FAILURES

Advance: TypeAlias = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Executes one ``action`` [R,D] in ``env_ids`` int [R], whose clocks count it already.

Returns reward [R], success bool [R], and the codes of the causes of ends int [R], 0 while an episode runs.
"""


class Causes(Sequence[str]):
    """``Step.cause`` of ``E`` environments: a code for each and a table of texts, instead of ``E`` strings a step.

    It behaves as a tuple of the strings and equals one.
    """

    def __init__(self, codes: np.ndarray, table: tuple[str, ...]) -> None:
        """``codes`` int [E] index ``table``; they are not copied."""
        self.codes, self.table = codes, table

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Causes: ...

    def __getitem__(self, index: int | slice) -> str | Causes:
        return Causes(self.codes[index], self.table) if isinstance(index, slice) else self.table[self.codes[index]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Causes) and other.table == self.table:
            return np.array_equal(self.codes, other.codes)
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(map(str.__eq__, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list: the codes are an array

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        texts: np.ndarray = np.array(self.table, object)[self.codes]
        return texts.astype(dtype or object)

    def count(self, value: str) -> int:
        """How many environments have the cause ``value``."""
        return int((self.codes == self.table.index(value)).sum()) if value in self.table else 0


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
        ended: np.ndarray = self.terminated | self.truncated
        return ended

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays [E] of a snapshot."""
        names = ("seed", "time", "cause", "terminated", "truncated", "success")
        return {name: getattr(self, name) for name in names}

    def flags(self) -> dict[str, Any]:
        """Copies of the fields of a Step that say how episodes ended."""
        flags: dict[str, Any] = {name: getattr(self, name).copy() for name in ("terminated", "truncated", "success")}
        return flags | {"cause": Causes(self.cause.copy(), self.causes)}

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
        """Start episodes in ``env_ids``."""
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
        clipped: np.ndarray = np.minimum(np.maximum(action, low), high).astype(spec.action.dtype)
        return clipped

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
