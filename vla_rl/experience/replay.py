"""A replay buffer: recorded decisions in a ring of bounded size, in memory or on the disk.

Every decision can be sampled as soon as it is added.  Decisions of an episode lie in consecutive slots, followed by one
slot for the observation after the last of them, so truncation needs no special case.  A running episode is stored like
one that was truncated at its latest observation, and is stored anew when it has gone on: a buffer of ended episodes
alone would hold too many short ones at first.  Discounts count low-level actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.running import FEATURES, Columns, Running, advance
from vla_rl.experience.storage import Filled, InMemory, Storage


class Replay:
    """A ``ReplayBuffer`` of the last ``capacity`` slots, one per decision and one for each episode's end.

    ``sample`` looks ``n_step`` decisions ahead, never past an end.  ``gamma`` is per low-level action: a chunk's reward
    is the discounted sum over the actions that were executed, and the value after it is discounted by their number.
    Episodes are continued within a stream (``Rollout.stream``) only, so several robots can fill one buffer.
    """

    def __init__(self, capacity: int, gamma: float, n_step: int = 1, storage: Storage | None = None) -> None:
        """``storage`` holds the columns, see ``storage.py``; one that holds decisions already is continued."""
        if capacity < 2 or n_step < 1 or not 0 < gamma <= 1:
            raise UserError(
                f"a replay buffer of {capacity} slots, gamma {gamma} and {n_step} steps cannot hold or value a "
                "decision; give at least 2 slots, 0 < gamma <= 1 and 1 step."
            )
        self.capacity, self.gamma, self.n_step = capacity, gamma, n_step
        self.storage = storage or InMemory()
        self.columns, self._filled, robots = self.storage.open({"capacity": capacity, "gamma": gamma})
        self.robots = list(robots)  # what the column "robot" counts
        self._running: dict[str, Running] = {}  # by stream
        self._decisions: Tensor | None = None

    def __len__(self) -> int:
        """Decisions that can be sampled."""
        return len(self.decisions())

    # -- adding -----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout) -> int:
        """Store the decisions of ``rollout``, which continues the last one of its stream.

        Returns how many of them can be sampled.  Raises UserError for an episode that does not fit and ContractError
        for a rollout of other shapes; such a rollout is not kept.
        """
        running = self._running.get(rollout.stream, Running())
        robots = list(dict.fromkeys([*self.robots, rollout.robot]))
        ended, running = advance(running, rollout, self.gamma, robots.index(rollout.robot))
        streams = {**self._running, rollout.stream: running}
        unfinished = [part for part in (item.slots(self.gamma) for item in streams.values()) if part]
        for part in [ended, *unfinished]:
            self._require_fit(part)
        self._withdraw()
        self.robots, self._running = robots, streams
        self._write(ended)
        cursor, size, _ = self._filled
        for part in unfinished:
            self._write(part)
        provisional = sum(len(part["count"]) for part in unfinished)
        self._note((cursor, size, min(provisional, self.capacity)))
        new = int(rollout.valid.any(-1).sum())
        return min(new, len(self))

    def _withdraw(self) -> None:
        """Let the slots of running episodes be overwritten: their longer versions take at least as many.

        Episodes that ran in an earlier process are unknown to this one and stay as truncated ones.
        """
        cursor, size, provisional = self._filled
        if provisional and not any(len(running.env_ids) for running in self._running.values()):
            cursor, size = (cursor + provisional) % self.capacity, min(self.capacity, size + provisional)
        self._filled = (cursor, size, 0)

    def _write(self, columns: Columns) -> None:
        """Write slots behind the cursor; if they are more than the ring has, the last ones."""
        if not columns:
            return
        length = len(columns["count"])
        if not self.columns:
            shapes = {name: (tuple(item.shape[1:]), item.dtype) for name, item in columns.items()}
            self.columns = self.storage.allocate(shapes)
        cursor, size, _ = self._filled
        self._decisions = None
        begin = (cursor + max(0, length - self.capacity)) % self.capacity
        behind = min(length, self.capacity, self.capacity - begin)  # slots before the ring's end, the others wrap
        parts = [
            (slice(begin, begin + behind), slice(0, behind)),
            (slice(0, min(length, self.capacity) - behind), slice(behind, None)),
        ]
        remaining = self.columns["remaining"]
        for slots, _ in parts:
            remaining[slots] = 0  # a process killed while writing leaves no slot that is half of another
        for name in sorted(columns, key="remaining".__eq__):  # that one last
            column, values = self.columns[name], columns[name][-self.capacity :]
            for slots, part in parts:
                column[slots] = values[part].to(column.device)
        self._note(((cursor + length) % self.capacity, min(self.capacity, size + length), 0))

    def _note(self, filled: Filled) -> None:
        self._filled = filled
        self.storage.note(filled, self.robots)

    def _require_fit(self, columns: Columns) -> None:
        """Raise UserError for an episode that is too long and ContractError for columns of other shapes."""
        if columns and int(columns["remaining"].max()) >= self.capacity:
            raise UserError(
                f"an episode of {int(columns['remaining'].max())} decisions does not fit into a replay buffer of "
                f"{self.capacity} slots, so its rollout was not kept; give the buffer more."
            )
        for name in sorted(columns.keys() | self.columns.keys()) if columns and self.columns else ():
            ours = self.columns[name].shape[1:] if name in self.columns else None
            theirs = columns[name].shape[1:] if name in columns else None
            if ours != theirs:
                raise ContractError(
                    f"a rollout brought {name!r} of shape {theirs and list(theirs)} to a replay buffer that holds "
                    f"{ours and list(ours)}, so it was not kept; fill one buffer from one policy and environment."
                )

    # -- sampling ---------------------------------------------------------------------------------------------------

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """``size`` decisions, uniformly and with replacement."""
        return self.transitions(_draw(self.decisions(), size, generator))

    def transitions(self, slots: Tensor, n_step: int = 0) -> Transitions:
        """The decisions in ``slots`` int [B] with what followed them, ``n_step`` decisions ahead (0: the buffer's)."""
        columns, n_step = self.columns, n_step or self.n_step
        ahead = columns["remaining"][slots].clamp_max(n_step)
        reward, discount = torch.zeros_like(columns["reward"][slots]), torch.ones_like(columns["reward"][slots])
        for k in range(n_step):
            slot, within = (slots + k) % self.capacity, k < ahead
            reward += torch.where(within, discount * columns["reward"][slot], 0.0)
            discount *= torch.where(within, self.gamma ** columns["count"][slot], 1.0)
        terminated = columns["terminated"][(slots + ahead - 1) % self.capacity]
        next_features = (slots + ahead) % self.capacity
        names = [name for name in columns if name.startswith(FEATURES)]
        found = Transitions(
            features={name.removeprefix(FEATURES): columns[name][slots] for name in names},
            sample=columns["sample"][slots],
            executed=columns["executed"][slots],
            count=columns["count"][slots],
            reward=reward,
            discount=torch.where(terminated, 0.0, discount),
            next_features={name.removeprefix(FEATURES): columns[name][next_features] for name in names},
            returns=columns["returns"][slots],
            intervened=columns["intervened"][slots],
            version=columns["version"][slots],
            task=columns["task"][slots],
            robot=columns["robot"][slots],
        )
        return _on_device(found, self.storage.device)

    def decisions(self) -> Tensor:
        """The slots that hold a decision, int [N]."""
        if self._decisions is None:
            _, size, provisional = self._filled
            filled = min(self.capacity, size + provisional)
            self._decisions = (
                (self.columns["remaining"] if self.columns else torch.zeros(0))[:filled].nonzero().flatten()
            )
        return self._decisions

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the future depends on (see ``Resumable``), except for columns that the storage keeps itself."""
        return {
            "capacity": self.capacity,
            "filled": list(self._filled),
            "robots": self.robots,
            "running": {stream: running.to_state() for stream, running in self._running.items()},
            "columns": self.storage.state(self.columns),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError when the saved decisions do not fit; a larger buffer than the saved one is allowed."""
        self._running = {stream: Running.from_state(item) for stream, item in state["running"].items()}
        saved: Columns = state["columns"]
        if not saved:
            return
        self.robots, self._decisions = list(state["robots"]), None
        cursor, size, provisional = state["filled"]
        if state["capacity"] != self.capacity:
            saved, size = self._unrolled(saved, state), len(saved["count"]) - provisional
            cursor = size
        if not self.columns:
            shapes = {name: (tuple(item.shape[1:]), item.dtype) for name, item in saved.items()}
            self.columns = self.storage.allocate(shapes)
        for name, item in saved.items():
            self.columns[name][: len(item)] = item
        self._note((cursor, size, provisional))

    def _unrolled(self, saved: Columns, state: Mapping[str, Any]) -> Columns:
        """The columns of a ring of another capacity, its oldest slot first and its running episodes last."""
        filled, (cursor, _, provisional) = len(saved["count"]), state["filled"]
        if filled > self.capacity:
            raise UserError(
                f"the saved replay buffer holds {filled} slots but this one has {self.capacity}, so decisions would be "
                "lost; give it at least as many."
            )
        oldest = cursor + provisional if filled == state["capacity"] else 0
        return {name: item.roll(-oldest, 0) for name, item in saved.items()}


def _on_device(decisions: Transitions, device: torch.device) -> Transitions:
    def moved(item: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        if isinstance(item, Tensor):
            return item.to(device)
        return {name: value.to(device) for name, value in item.items()}

    parts: dict[str, Any] = {part.name: moved(getattr(decisions, part.name)) for part in fields(decisions)}
    return Transitions(**parts)


class Interventions:
    """A ``ReplayBuffer`` of the decisions in which a person acted: a view of ``replay`` that stores nothing itself."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __len__(self) -> int:
        return len(self.decisions())

    def add(self, rollout: Rollout) -> int:
        return 0

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        return self.replay.transitions(_draw(self.decisions(), size, generator))

    def decisions(self) -> Tensor:
        decisions = self.replay.decisions()
        return decisions[self.replay.columns["intervened"][decisions]] if len(decisions) else decisions

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _draw(decisions: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """``size`` of the slots ``decisions``, with replacement."""
    if not len(decisions):
        raise UserError("the replay buffer holds no such decision yet, so none can be drawn; add a rollout first.")
    return decisions[torch.randint(len(decisions), (size,), generator=generator).to(decisions.device)]
