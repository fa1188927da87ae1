"""Demonstrations: recorded episodes as arrays with one entry per control step (on disk: ``datasets.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vla_rl.contract.env import Observation
from vla_rl.contract.errors import ContractError, did_you_mean


@dataclass(frozen=True)
class Demonstrations:
    """``N`` control steps of whole episodes, in order, with the names and units of their numbers.

    images  {camera: uint8 [N,h,w,c]}
    state   float32 [N,S]
    task    int64 [N]    index into ``tasks``
    time    int64 [N]    control steps since the episode began
    action  float32 [N,D]  executed actions
    episode int64 [N]    0, 1, ...
    seed    int64 [N]    of the episode, -1 when unknown
    tasks   the texts of the instructions
    fps     control steps per second
    extras  {name: [N,...]}  all other recorded columns, under the dataset's names: "next.reward", "next.success", ...
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    task: np.ndarray
    time: np.ndarray
    action: np.ndarray
    episode: np.ndarray
    seed: np.ndarray
    tasks: tuple[str, ...]
    fps: float
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    robot: str = ""

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(np.unique(self.episode))

    def spans(self) -> list[tuple[int, int]]:
        """First step and the one after the last, of every episode."""
        begins = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.episode)], strict=True))

    def observation(self) -> Observation:
        """All steps as one batch of observations."""
        return Observation(self.images, self.state, self.task, self.time)

    def chunks(self, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``horizon`` actions that follow each step [N,H,D], and which of them were demonstrated, bool [N,H].

        Past an episode's end its last action is repeated; nobody demonstrated that, so no loss may count it.
        """
        last = np.searchsorted(self.episode, self.episode, side="right")[:, None] - 1
        ahead = np.arange(len(self.episode))[:, None] + np.arange(horizon)
        return np.asarray(self.action[np.minimum(ahead, last)]), ahead <= last

    def with_tasks(self, tasks: Sequence[str]) -> Demonstrations:
        """The same with ``task`` as an index into another table of texts, such as an environment's or a policy's.

        Raises ContractError for an instruction of these episodes that is not in ``tasks``.
        """
        used = [self.tasks[i] for i in np.unique(self.task)]
        for text in used:
            if text not in tasks:
                raise ContractError(
                    f"the episodes have the task {text!r}, which is not in the table, so it could not be "
                    f"distinguished from others; {did_you_mean(text, tasks)}"
                )
        numbers = np.array([tasks.index(text) if text in used else -1 for text in self.tasks], np.int64)
        return replace(self, task=numbers[self.task], tasks=tuple(tasks))

    @classmethod
    def joined(cls, parts: Sequence[Demonstrations]) -> Demonstrations:
        """``parts`` concatenated, with episodes renumbered from 0; raises ContractError when their columns differ."""
        first = parts[0]
        tasks = tuple(dict.fromkeys(text for part in parts for text in part.tasks))
        parts = [part if part.tasks == tasks else part.with_tasks(tasks) for part in parts]
        for part in parts:
            if part.images.keys() != first.images.keys() or part.extras.keys() != first.extras.keys():
                raise ContractError(
                    f"episodes with {sorted({*part.images, *part.extras})} cannot be joined to episodes with "
                    f"{sorted({*first.images, *first.extras})}; leave out the columns that they do not share."
                )
        lengths = [end - begin for part in parts for begin, end in part.spans()]
        return replace(
            first,
            images={name: np.concatenate([part.images[name] for part in parts]) for name in first.images},
            extras={name: np.concatenate([part.extras[name] for part in parts]) for name in first.extras},
            task=np.concatenate([part.task for part in parts]),
            episode=np.repeat(np.arange(len(lengths)), lengths),
            tasks=tasks,
            state=np.concatenate([part.state for part in parts]),
            time=np.concatenate([part.time for part in parts]),
            action=np.concatenate([part.action for part in parts]),
            seed=np.concatenate([part.seed for part in parts]),
        )
