"""What every environment of rows without autoreset has to check and keep, whatever simulates it (numpy only)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, Snapshot, Step
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.spec import EnvSpec

SUCCESS, TIME_LIMIT, DIVERGED, FAILURES = 1, 2, 3, 4  # codes of causes; failures of a task count from FAILURES


class RowBook:
    """Seeds, clocks and latched ends of ``E`` rows, and the validation of what callers hand in."""

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
        """bool [E]: rows that idle."""
        ended: np.ndarray = self.terminated | self.truncated
        return ended

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays [E] that a snapshot holds."""
        names = ("seed", "time", "cause", "terminated", "truncated", "success")
        return {name: getattr(self, name) for name in names}

    def flags(self) -> dict[str, Any]:
        """Copies of what a Step says about the rows' ends."""
        flags: dict[str, Any] = {name: getattr(self, name).copy() for name in ("terminated", "truncated", "success")}
        return flags | {"cause": tuple(map(self.causes.__getitem__, self.cause.tolist()))}

    def step(
        self, obs: Observation, reward: np.ndarray, valid: np.ndarray, action: np.ndarray, frames: Sequence[Observation]
    ) -> Step:
        """What a step of ``action`` [E,H,D] returns: nobody intervened, and what was not valid was not executed."""
        executed, intervened = np.where(valid[..., None], action, np.float32(0)), np.zeros_like(valid)
        return Step(obs, reward, valid, **self.flags(), executed=executed, intervened=intervened, frames=tuple(frames))

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """New episodes in ``rows``."""
        self.seed[rows], self.time[rows], self.cause[rows] = seeds, 0, 0
        self.terminated[rows] = self.truncated[rows] = self.success[rows] = False

    def end(self, rows: np.ndarray, success: np.ndarray, cause: np.ndarray) -> None:
        """Latch how ``rows`` [R] ended: ``cause`` int [R] indexes ``causes``, 0 while a row runs.

        The time limit, divergence and ``cuts`` truncate, every other cause terminates.
        """
        self.success[rows], self.cause[rows] = success, cause
        truncated = (cause == TIME_LIMIT) | (cause == DIVERGED) | (cause >= self._first_cut)
        self.truncated[rows], self.terminated[rows] = truncated, (cause > 0) & ~truncated

    def index(self, rows: Any) -> np.ndarray:
        """``rows`` as int [R]; raises ContractError unless they are distinct rows."""
        index = np.asarray(rows, np.intp).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_envs or np.unique(index).size != index.size):
            raise ContractError(
                f"rows {index.tolist()} are not distinct rows of {self.num_envs} environments, so nothing was done; "
                f"give each row once, from 0 to {self.num_envs - 1}."
            )
        return index

    def seeds(self, rows: np.ndarray, seeds: Any) -> np.ndarray:
        """``seeds`` as int64 [R]; raises ContractError unless there is one of at least 0 for each of ``rows``."""
        seed = np.asarray(seeds, np.int64)
        if seed.shape != rows.shape or (seed < 0).any():
            raise ContractError(
                f"reset of {rows.size} rows got seeds of shape {seed.shape}, lowest {seed.min(initial=0)}, so nothing "
                "was reset; give one seed of at least 0 for every row."
            )
        return seed

    def require_started(self, rows: np.ndarray) -> None:
        """Raise ContractError when one of ``rows`` was never reset."""
        fresh = rows[self.seed[rows] < 0]
        if fresh.size:
            raise ContractError(
                f"row {fresh[0]} was never reset, so it has no episode; call reset([{fresh[0]}], [seed]) first."
            )

    def chunk(self, chunk: Any, spec: EnvSpec) -> np.ndarray:
        """``chunk`` as float32 [E,H,D] clipped to the bounds; raises before anything moves."""
        self.require_started(np.arange(self.num_envs))
        action = np.asarray(chunk, np.float32)
        expected = (self.num_envs, spec.action_dim)
        if action.ndim != 3 or action.shape[::2] != expected or not 1 <= action.shape[1] <= spec.max_chunk:
            raise ContractError(
                f"the action chunk has shape {action.shape}, so nothing was executed; give "
                f"[{expected[0]},H,{expected[1]}] with 1 <= H <= {spec.max_chunk}."
            )
        finite = np.isfinite(action)
        if not finite.all():
            self._require_idle(~finite, action)
            action = np.nan_to_num(action)
        low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
        clipped: np.ndarray = np.minimum(np.maximum(action, low), high)
        return clipped

    def _require_idle(self, wrong: np.ndarray, action: np.ndarray) -> None:
        """Raise NonFiniteError when an entry that is ``wrong`` [E,H,D] belongs to a row that runs."""
        bad = np.argwhere(wrong & ~self.done[:, None, None])
        if bad.size:
            row, step, entry = bad[0]
            raise NonFiniteError(
                f"action[{row},{step},{entry}] is {action[row, step, entry]} (row {row} at control step "
                f"{self.time[row] + step}), so nothing was executed; look for a diverged policy or normalisation."
            )


def select_rows(arrays: dict[str, np.ndarray], rows: np.ndarray) -> Snapshot:
    """Copies of ``rows`` of every array."""
    return {name: array[rows] for name, array in arrays.items()}


def restore_rows(arrays: dict[str, np.ndarray], rows: np.ndarray, snapshot: Snapshot) -> None:
    """Write ``snapshot`` into ``rows``; raises ContractError, with nothing written, when it does not fit."""
    wrong = set(arrays) ^ set(snapshot)
    wrong |= {name for name in set(arrays) - wrong if snapshot[name].shape != (rows.size, *arrays[name].shape[1:])}
    if wrong:
        raise ContractError(
            f"the snapshot does not fit these {rows.size} rows in {sorted(wrong)}, so nothing was restored; take it "
            "from an environment with the same options, and give it as many rows as it holds."
        )
    for name, array in arrays.items():
        array[rows] = snapshot[name]
