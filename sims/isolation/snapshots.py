"""Snapshots of isolated environments: those of the workers, and what their owner knows about episodes besides."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sims.isolation.channel import Arrays
from sims.isolation.env import IsolatedEnv
from sims.isolation.messages import FLAGS, OBS
from sims.isolation.supervised import Answer, Request, SupervisedWorker
from vla_rl.contract.env import Observation, Snapshot
from vla_rl.contract.errors import ContractError

_INNER = "worker/"  # what the workers have saved
_OWN = "isolated/"
_KEPT = _OWN + "kept/"  # the observations of frozen environments, in snapshots that have such
_CAUSE_BYTES = 64
_NOBODY = np.zeros(0, np.int64)


class IsolatedSnapshotEnv(IsolatedEnv):
    """Isolated environments that can be saved and restored in mid-episode (``Snapshots``)."""

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on; see ``Snapshots``."""
        index = self._book.index(env_ids)
        self._book.require_started(index)
        answers = self._insist(self._owners(index), partial(self._snapshot_request, index))
        found: Snapshot = {}
        for worker, answer in answers.items():
            places = self._places(index, worker)
            for name, part in answer.arrays.items():
                whole = found.setdefault(_INNER + name, np.zeros((index.size, *part.shape[1:]), part.dtype))
                whole[places] = part
        return found | self._own(index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``; see ``Snapshots``."""
        index = self._book.index(env_ids)
        arrays = {name: np.asarray(array) for name, array in snapshot.items()}
        missing = {_OWN + name for name in ("frozen", "seed", "time", "cause", *FLAGS)} - arrays.keys()
        if missing or any(array.shape[:1] != index.shape for array in arrays.values()):
            raise ContractError(
                f"the snapshot does not fit these {index.size} environments"
                f"{f' in {sorted(missing)}' if missing else ''}, so nothing was restored; take it from an isolated "
                "environment with the same options, and give as many env_ids as it has entries."
            )
        inner = {name.removeprefix(_INNER): array for name, array in arrays.items() if name.startswith(_INNER)}
        self._insist(self._owners(index), partial(self._restore_request, index, inner), index.tolist())
        for name in ("seed", "time", *FLAGS):
            getattr(self._book, name)[index] = arrays[_OWN + name]
        self._frozen[index] = arrays[f"{_OWN}frozen"]
        for env_id, cause in zip(index.tolist(), arrays[f"{_OWN}cause"], strict=True):
            self._cause[env_id] = bytes(cause).rstrip(b"\0").decode()
        for name, kept in self._kept.items():
            if _KEPT + name in arrays:
                kept[index] = arrays[_KEPT + name]
        return self._observation()

    def _own(self, index: np.ndarray) -> Arrays:
        """What the workers do not know of the environments ``index`` [R]."""
        found: Arrays = {_OWN + name: getattr(self._book, name)[index] for name in ("seed", "time", *FLAGS)}
        cause = np.zeros((index.size, _CAUSE_BYTES), np.uint8)
        for row, env_id in zip(cause, index.tolist(), strict=True):
            text = self._cause[env_id].encode()[:_CAUSE_BYTES]
            row[: len(text)] = np.frombuffer(text, np.uint8)
        found |= {f"{_OWN}frozen": self._frozen[index], f"{_OWN}cause": cause}
        if self._frozen[index].any():
            found |= {_KEPT + name: kept[index] for name, kept in self._kept.items()}
        return found

    def _snapshot_request(self, index: np.ndarray, worker: SupervisedWorker) -> Request:
        self._fill(worker)
        env_ids = index[self._places(index, worker)] - worker.rows.start

        def check(answer: Answer) -> None:
            if any(array.shape[:1] != env_ids.shape for array in answer.arrays.values()):
                raise ContractError(f"a snapshot of {env_ids.size} environments has arrays of another length.")

        return Request("snapshot", {"env_ids": env_ids.astype(np.int64)}, check)

    def _restore_request(self, index: np.ndarray, inner: Arrays, worker: SupervisedWorker) -> Request:
        self._fill(worker)
        places = self._places(index, worker)
        arrays = {f"saved/{name}": array[places] for name, array in inner.items()}
        arrays["env_ids"] = (index[places] - worker.rows.start).astype(np.int64)
        return Request("restore", arrays, partial(self._check_observation, OBS, worker.size), arguments=True)

    def _fill(self, worker: SupervisedWorker) -> None:
        """Start some episode in every environment of a new ``worker``; they stay frozen here."""
        while worker.fresh:
            self._ask({worker: self._reset_request(_NOBODY, _NOBODY, worker)})
