"""Replay: recorded decisions of whole episodes in a ring of bounded size, in memory or on the disk.

An episode enters when it has ended, with the observation after its last decision, so that truncation needs no special
case: what follows a decision is always in the slots behind it.  Discounts count low-level actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.storage import InMemory, Storage

_STORED = "features/"
Columns: TypeAlias = dict[str, Tensor]


class Replay:
    """A ``ReplayBuffer``: the last ``capacity`` slots of ended episodes, one slot per decision and one for each end.

    ``sample`` looks ``n_step`` decisions ahead, never past an end.  ``gamma`` is per low-level action: a chunk's reward
    is the discounted sum over the actions that were executed, and what follows it is discounted by their number.
    """

    def __init__(self, capacity: int, gamma: float, n_step: int = 1, storage: Storage | None = None) -> None:
        """``storage`` decides where the columns live, see ``storage.py``; one that holds decisions is gone on with."""
        if capacity < 2 or n_step < 1 or not 0 < gamma <= 1:
            raise UserError(
                f"a replay of {capacity} slots, gamma {gamma} and {n_step} steps cannot hold or value a decision; give "
                "at least 2 slots, 0 < gamma <= 1 and 1 step."
            )
        self.capacity, self.gamma, self.n_step = capacity, gamma, n_step
        self.storage = storage or InMemory()
        self.columns, self._cursor, self._size = self.storage.open({"capacity": capacity, "gamma": gamma})
        self._open: dict[int, list[Columns]] = {}  # what the rows of the source have played of running episodes
        self._playable: Tensor | None = None

    def __len__(self) -> int:
        """Decisions that can be sampled."""
        return len(self.decisions())

    # -- adding -----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout) -> int:
        """Keep what has ended in ``rollout``, windows of the same rows one after the other; the rest waits its end."""
        finals = {(int(t), int(e)): i for i, (t, e) in enumerate(rollout.final_index)}
        columns = _columns(rollout, self.gamma)
        ends = rollout.terminated | rollout.truncated
        begin, written = [0] * ends.shape[1], 0
        for end, row in ends.nonzero().tolist():  # in the order of time, so that it is the same however it was cut
            self._keep(row, columns, begin[row], end + 1)
            final = finals.get((end, row))
            last = {name: item[end, row] for name, item in rollout.features.items()}
            if final is not None:
                last = {name: item[final] for name, item in rollout.final_features.items()}
            written += self._close(row, last)
            begin[row] = end + 1
        for row, at in enumerate(begin):
            self._keep(row, columns, at, len(ends))
        newest = (self._cursor - 1 - torch.arange(min(written, self.capacity))) % self.capacity
        return int((self.columns["remaining"][newest] > 0).sum()) if written else 0

    def _keep(self, row: int, columns: Columns, begin: int, end: int) -> None:
        part = {name: item[begin:end, row] for name, item in columns.items()}
        part = {name: item[part["count"] > 0] for name, item in part.items()}  # idle decisions are none
        if not len(part["count"]):
            return
        played = self._open.setdefault(row, [])
        if played and played[-1]["seed"][-1] != part["seed"][0]:
            played.clear()  # the row was started anew before its episode ended: what came of it is not known
        played.append(part)

    def _close(self, row: int, last: Mapping[str, Tensor]) -> int:
        """Write the episode that ``row`` has played, followed by ``last`` {name: [...]}, what it saw at its end.

        Returns the number of slots.
        """
        parts = self._open.pop(row, [])
        if not parts:
            return 0
        episode = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        length = len(episode["count"])
        episode["returns"] = _returns(episode, self.gamma)
        episode["remaining"] = torch.arange(length, 0, -1)
        end = {name: item.new_zeros(1, *item.shape[1:]) for name, item in episode.items()}
        end |= {_STORED + name: item[None] for name, item in last.items()}
        self._write({name: torch.cat([item, end[name]]) for name, item in episode.items()}, length + 1)
        return length + 1

    def _write(self, columns: Columns, length: int) -> None:
        if length > self.capacity:
            raise UserError(
                f"an episode of {length - 1} decisions does not fit into a replay of {self.capacity} slots, so it was "
                "not kept; give the replay more."
            )
        if not self.columns:
            shapes = {name: (tuple(item.shape[1:]), item.dtype) for name, item in columns.items()}
            self.columns = self.storage.allocate(shapes)
        self._require_same(columns)
        index, self._playable = (self._cursor + torch.arange(length)) % self.capacity, None
        self.columns["remaining"][index] = 0  # whoever is killed in between leaves no slot that is half of another
        for name in sorted(columns, key="remaining".__eq__):  # that one last
            self.columns[name][index] = columns[name]
        self._cursor = (self._cursor + length) % self.capacity
        self._size = min(self.capacity, self._size + length)
        self.storage.note(self._cursor, self._size)

    def _require_same(self, columns: Columns) -> None:
        for name in columns.keys() | self.columns.keys():
            ours = self.columns[name].shape[1:] if name in self.columns else None
            theirs = columns[name].shape[1:] if name in columns else None
            if ours != theirs:
                raise ContractError(
                    f"a decision brought {name!r} of shape {theirs and list(theirs)} to a replay that holds "
                    f"{ours and list(ours)}, so it was not kept; fill one replay from one policy and environment."
                )

    # -- sampling ---------------------------------------------------------------------------------------------------

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """``size`` decisions, uniformly and with replacement."""
        return self.transitions(_drawn(self.decisions(), size, generator))

    def transitions(self, slots: Tensor) -> Transitions:
        """The decisions in ``slots`` int [B] and what followed them."""
        columns = self.columns
        ahead = columns["remaining"][slots].clamp_max(self.n_step)
        reward, discount = torch.zeros(len(slots)), torch.ones(len(slots))
        for k in range(self.n_step):
            slot, within = (slots + k) % self.capacity, k < ahead
            reward += torch.where(within, discount * columns["reward"][slot], 0.0)
            discount *= torch.where(within, self.gamma ** columns["count"][slot], 1.0)
        terminated = columns["terminated"][(slots + ahead - 1) % self.capacity]
        next_features = (slots + ahead) % self.capacity
        names = [name for name in columns if name.startswith(_STORED)]
        return Transitions(
            features={name.removeprefix(_STORED): columns[name][slots] for name in names},
            sample=columns["sample"][slots],
            executed=columns["executed"][slots],
            reward=reward,
            discount=torch.where(terminated, 0.0, discount),
            next_features={name.removeprefix(_STORED): columns[name][next_features] for name in names},
            returns=columns["returns"][slots],
            intervened=columns["intervened"][slots],
        )

    def decisions(self) -> Tensor:
        """The slots that hold a decision, int [N]."""
        if self._playable is None:
            remaining = self.columns["remaining"][: self._size] if self.columns else torch.zeros(0)
            self._playable = remaining.nonzero().flatten()
        return self._playable

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the future depends on (see ``Resumable``), as far as the storage does not keep it itself."""
        running = {str(row): parts for row, parts in self._open.items()}
        return {
            "cursor": self._cursor,
            "size": self._size,
            "open": running,
            "columns": self.storage.state(self.columns),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._open = {int(row): list(parts) for row, parts in state["open"].items()}
        kept: Columns = state["columns"]
        if kept:
            _require_room(kept, self.capacity)
            self._cursor, self._size, self._playable = state["cursor"], state["size"], None
            shapes = {name: (tuple(item.shape[1:]), item.dtype) for name, item in kept.items()}
            self.columns = self.columns or self.storage.allocate(shapes)
            for name, item in kept.items():
                self.columns[name][: len(item)] = item
            self.storage.note(self._cursor, self._size)


class Interventions:
    """A ``ReplayBuffer`` of the decisions in which a person acted: a view of ``replay`` that keeps nothing itself."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __len__(self) -> int:
        return len(self.decisions())

    def add(self, rollout: Rollout) -> int:
        return 0

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        return self.replay.transitions(_drawn(self.decisions(), size, generator))

    def decisions(self) -> Tensor:
        decisions = self.replay.decisions()
        return decisions[self.replay.columns["intervened"][decisions]] if len(decisions) else decisions

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _require_room(kept: Columns, capacity: int) -> None:
    """Raise UserError when a saved replay does not fit."""
    filled = len(next(iter(kept.values())))
    if filled > capacity:
        raise UserError(
            f"the saved replay holds {filled} slots but this one has {capacity}, so decisions would be lost; give it "
            "at least as many."
        )


def _drawn(decisions: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """``size`` of the slots ``decisions``, with replacement."""
    if not len(decisions):
        raise UserError("the memory holds no such decision yet, so none can be drawn; wait until an episode has ended.")
    return decisions[torch.randint(len(decisions), (size,), generator=generator)]


def _columns(rollout: Rollout, gamma: float) -> Columns:
    """What is kept of every decision [T,E,...]."""
    valid = rollout.valid
    powers = gamma ** torch.arange(valid.shape[-1])
    columns = {
        "sample": rollout.sample,
        "executed": rollout.executed,
        "reward": (torch.where(valid, rollout.reward, 0.0) * powers).sum(-1),
        "count": valid.sum(-1),
        "terminated": rollout.terminated,
        "intervened": rollout.intervened.any(-1),
        "seed": rollout.seeds,
    }
    return columns | {_STORED + name: item[:-1] for name, item in rollout.features.items()}


def _returns(episode: Columns, gamma: float) -> Tensor:
    """The discounted sum [L] from each decision to the end; -inf when the episode was truncated."""
    reward, count = episode["reward"], episode["count"]
    found = torch.full_like(reward, -torch.inf)
    if episode["terminated"][-1]:
        total = torch.zeros(())
        for i in range(len(reward) - 1, -1, -1):
            total = reward[i] + gamma ** count[i] * total
            found[i] = total
    return found
