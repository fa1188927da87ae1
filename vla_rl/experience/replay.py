"""A replay buffer: recorded decisions in a ring of bounded size, in memory or on the disk.

Every decision can be sampled as soon as it is added.  Decisions of an episode lie in consecutive slots, followed by one
slot for the observation after the last of them, so truncation needs no special case.  A running episode is stored like
one that was truncated at its latest observation, and is stored anew when it has gone on: a buffer of ended episodes
alone would hold too many short ones at first.  Discounts count low-level actions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import read_json
from vla_rl.experience.rollout import moved

FEATURES = "features/"
Columns: TypeAlias = dict[str, Tensor]
Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Numbers: TypeAlias = Mapping[str, float]
Filled: TypeAlias = tuple[int, int, int]  # next slot, slots of ended episodes, slots of running ones behind them
_META = "replay.json"


class Replay:
    """A ``ReplayBuffer`` of the last ``capacity`` slots, one per decision and one for each episode's end.

    ``sample`` looks ``n_step`` decisions ahead, never past an end.  ``gamma`` is per low-level action: a chunk's reward
    is the discounted sum over the actions that were executed, and the value after it is discounted by their number.
    Episodes are continued within a stream (``Rollout.stream``) only, so several robots can fill one buffer.
    """

    def __init__(self, capacity: int, gamma: float, n_step: int = 1, storage: InMemory | None = None) -> None:
        """``storage`` holds the columns; one that holds decisions already is continued."""
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
        self._allocate(columns)
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

    def _allocate(self, like: Columns) -> None:
        if not self.columns:
            shapes = {name: (tuple(item.shape[1:]), item.dtype) for name, item in like.items()}
            self.columns = self.storage.allocate(shapes)

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
        ours, theirs = ({name: list(item.shape[1:]) for name, item in it.items()} for it in (self.columns, columns))
        for name in sorted(ours.keys() | theirs.keys()) if ours and theirs else ():
            if ours.get(name) != theirs.get(name):
                raise ContractError(
                    f"a rollout brought {name!r} of shape {theirs.get(name)} to a replay buffer that holds "
                    f"{ours.get(name)}, so it was not kept; fill one buffer from one policy and environment."
                )

    # -- sampling ---------------------------------------------------------------------------------------------------

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """``size`` decisions, uniformly and with replacement."""
        return self.transitions(_draw(self.decisions(), size, generator))

    def transitions(self, slots: Tensor) -> Transitions:
        """The decisions in ``slots`` int [B] with what followed them, ``n_step`` decisions ahead."""
        columns, n_step = self.columns, self.n_step
        ahead = columns["remaining"][slots].clamp_max(n_step)
        reward, discount = torch.zeros_like(columns["reward"][slots]), torch.ones_like(columns["reward"][slots])
        for k in range(n_step):
            slot, within = (slots + k) % self.capacity, k < ahead
            reward += torch.where(within, discount * columns["reward"][slot], 0.0)
            discount *= torch.where(within, self.gamma ** columns["count"][slot], 1.0)
        terminated = columns["terminated"][(slots + ahead - 1) % self.capacity]
        next_features = (slots + ahead) % self.capacity
        names = [name for name in columns if name.startswith(FEATURES)]
        plain = ("sample", "executed", "count", "returns", "intervened", "version", "task", "robot")
        found = Transitions(
            **{name: columns[name][slots] for name in plain},
            features={name.removeprefix(FEATURES): columns[name][slots] for name in names},
            reward=reward,
            discount=torch.where(terminated, 0.0, discount),
            next_features={name.removeprefix(FEATURES): columns[name][next_features] for name in names},
        )
        return moved(found, self.storage.device)

    def decisions(self) -> Tensor:
        """The slots that hold a decision, int [N]."""
        if self._decisions is None:
            _, size, provisional = self._filled
            filled = min(self.capacity, size + provisional)
            remaining = self.columns["remaining"] if self.columns else torch.zeros(0)
            self._decisions = remaining[:filled].nonzero().flatten()
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
        self._allocate(saved)
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


@dataclass(frozen=True)
class Running:
    """The running episodes of a stream: what its environments have played since their last reset.

    columns  {name: [L,...]}  their decisions, by environment and in order of time
    env_ids  int [L]          the environment of each decision
    latest   {name: [R,...]}  features of the latest observation of each episode, by environment
    """

    columns: Columns = field(default_factory=dict)
    env_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    latest: Columns = field(default_factory=dict)

    def slots(self, gamma: float) -> Columns:
        """Each episode as if it were truncated at its latest observation; {} when there is none."""
        if not len(self.env_ids):
            return {}
        first = np.flatnonzero(np.diff(self.env_ids, prepend=-1))
        last = np.append(first[1:], len(self.env_ids)) - 1
        return _slots(self.columns, np.arange(len(self.env_ids)), first, last, self.latest, gamma)

    def to_state(self) -> dict[str, Any]:
        return {"columns": self.columns, "env_ids": torch.from_numpy(self.env_ids), "latest": self.latest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Running:
        return cls(dict(state["columns"]), on_host(state["env_ids"]), dict(state["latest"]))


def advance(running: Running, rollout: Rollout, gamma: float, robot: int) -> tuple[Columns, Running]:
    """Add ``rollout`` to the ``running`` episodes: the slots of those that ended, in the order of time, and the rest.

    An episode of ``n`` decisions takes ``n`` slots and one more for the observation after them.  An episode whose
    environment was reset before its end (the seed changes) counts as truncated at its latest known observation.  An end
    that came with a decision without valid actions (cause "worker") is that of the decision before it.
    """
    steps = _Steps.of(running, rollout)
    if not len(steps.env_ids):
        return {}, running
    table = _table(running, _columns(rollout, gamma, robot))
    first = np.flatnonzero(steps.starts)
    last = np.append(first[1:], len(steps.env_ids)) - 1
    ended = steps.ended[last]
    newest = np.append(np.diff(steps.env_ids[last]) != 0, True)  # of its environment
    broken, waiting = ~ended & ~newest, ~ended & newest
    carried = steps.time[last] < 0  # the rollout holds no decision of it
    closed = np.flatnonzero(ended | broken)
    when = np.where(broken, np.where(carried, -1, steps.time[last] + 0.5), steps.time[last])
    closed = closed[np.lexsort((steps.env_ids[first][closed], when[closed]))]
    ends = _end_features(running, rollout, table, steps, last)
    last = last - (broken & ~carried)  # the observation after its last decision is missing
    closed = closed[last[closed] >= first[closed]]
    selected = {name: item[torch.from_numpy(closed)] for name, item in ends.items()}
    slots = _slots(table, steps.source, first[closed], last[closed], selected, gamma) if len(closed) else {}
    going_on = np.repeat(waiting, np.diff(first, append=len(steps.env_ids)))
    index, env_ids = torch.from_numpy(steps.source[going_on]), steps.env_ids[going_on]
    latest = {name: item[-1][torch.from_numpy(np.unique(env_ids))] for name, item in rollout.features.items()}
    return slots, Running({name: item[index] for name, item in table.items()}, env_ids, latest)


def _ends(running: Running, rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where episodes end, at the last decision of each that has a valid action.

    bool [T,E], the index of the observation after it in ``rollout.final_features`` int [T,E], -1 without one, and bool
    [L] for the decisions of running episodes.
    """
    active, seeds = on_host(rollout.valid.any(-1)), on_host(rollout.seeds)
    over, of_running = on_host(rollout.terminated | rollout.truncated).copy(), np.zeros(len(running.env_ids), bool)
    final = np.full(seeds.shape, -1)
    t, e = on_host(rollout.final_index).reshape(-1, 2).T
    final[t, e] = np.arange(len(t))
    for time, env_id in np.argwhere(over & ~active).tolist():
        before = np.flatnonzero(active[:time, env_id])
        carried = np.flatnonzero(running.env_ids == env_id)
        if before.size and not over[before[-1], env_id] and seeds[before[-1], env_id] == seeds[time, env_id]:
            over[before[-1], env_id], final[before[-1], env_id] = True, final[time, env_id]
        elif not before.size and carried.size and int(running.columns["seed"][carried[-1]]) == seeds[time, env_id]:
            of_running[carried[-1]] = True
    return over, final, of_running


@dataclass(frozen=True)
class _Steps:
    """The decisions of running episodes and of a rollout, by environment and in order of time."""

    source: np.ndarray  # index into the running episodes' decisions followed by the rollout's [T*E]
    env_ids: np.ndarray
    time: np.ndarray  # in the rollout, -1 for decisions of earlier ones
    ended: np.ndarray  # bool, by an end that the rollout states
    starts: np.ndarray  # bool, the first decision of an episode
    final: np.ndarray  # index into ``rollout.final_features`` of the observation after it, -1 without one

    @classmethod
    def of(cls, running: Running, rollout: Rollout) -> _Steps:
        over, final_of, over_of_running = _ends(running, rollout)
        time, env_ids = np.nonzero(on_host(rollout.valid.any(-1)))
        known, envs = len(running.env_ids), rollout.seeds.shape[1]
        seeds = on_host(rollout.seeds)[time, env_ids]
        if known:
            seeds = np.concatenate([on_host(running.columns["seed"]), seeds])
        order = np.argsort(np.concatenate([running.env_ids, env_ids]), kind="stable")
        env, seed = np.concatenate([running.env_ids, env_ids])[order], seeds[order]
        ended = np.concatenate([over_of_running, over[time, env_ids]])[order]
        starts = np.ones(len(order), bool)
        starts[1:] = (env[1:] != env[:-1]) | ended[:-1] | (seed[1:] != seed[:-1])
        source = np.concatenate([np.arange(known), known + time * envs + env_ids])[order]
        final = np.concatenate([np.full(known, -1), final_of[time, env_ids]])[order]
        return cls(source, env, np.concatenate([np.full(known, -1), time])[order], ended, starts, final)


def _table(running: Running, columns: Columns) -> Columns:
    """The decisions of running episodes followed by those of a rollout, ``columns`` {name: [T,E,...]}."""
    flat = {name: item.flatten(0, 1) for name, item in columns.items()}
    if not len(running.env_ids):
        return flat
    return {name: torch.cat([running.columns[name].to(item), item]) for name, item in flat.items()}


def _end_features(running: Running, rollout: Rollout, table: Columns, steps: _Steps, last: np.ndarray) -> Columns:
    """The features after the decisions ``last``: final ones of truncated episodes, the latest known ones of broken.

    Those of a terminated episode have no value; the features of its last decision stand there.
    """
    env_ids, row = steps.env_ids[last], steps.final[last]
    carried = np.flatnonzero(steps.time[last] < 0)
    episode = torch.from_numpy(np.searchsorted(np.unique(running.env_ids), env_ids[carried]))
    found = {}
    for name in rollout.features:
        ends = table[FEATURES + name][torch.from_numpy(steps.source[last])]
        truncated = np.flatnonzero(row >= 0)
        ends[torch.from_numpy(truncated)] = rollout.final_features[name][torch.from_numpy(row[truncated])].to(ends)
        if len(carried):
            ends[torch.from_numpy(carried)] = running.latest[name][episode].to(ends)
        found[name] = ends
    return found


def _slots(
    table: Columns, source: np.ndarray, first: np.ndarray, last: np.ndarray, ends: Columns, gamma: float
) -> Columns:
    """The episodes from decision ``first[k]`` to ``last[k]``, each followed by a slot with the features ``ends``.

    Decision ``i`` is row ``source[i]`` of ``table``.
    """
    length = last - first + 1
    stop = np.cumsum(length + 1) - 1  # the slot after the last decision of each
    within = np.arange(stop[-1] + 1) - np.repeat(stop - length, length + 1)
    decision = np.repeat(first, length + 1) + np.minimum(within, np.repeat(length, length + 1) - 1)
    index = torch.from_numpy(source[decision])
    after = torch.from_numpy(stop)
    found = {name: item[index] for name, item in table.items()}
    for name, item in found.items():
        if name.startswith(FEATURES):
            item[after] = ends[name.removeprefix(FEATURES)].to(item)
        else:
            item[after] = 0
    found["remaining"] = torch.from_numpy(np.repeat(length, length + 1) - within)
    found["returns"] = _returns(found, stop, length, gamma)
    return found


def _columns(rollout: Rollout, gamma: float, robot: int) -> Columns:
    """What is kept of every decision {name: [T,E,...]}."""
    valid = rollout.valid
    powers = gamma ** torch.arange(valid.shape[-1], device=valid.device)
    task = torch.zeros_like(rollout.seeds) if rollout.task is None else rollout.task
    columns = {
        "sample": rollout.sample,
        "executed": rollout.executed,
        "reward": (torch.where(valid, rollout.reward, 0.0) * powers).sum(-1),
        "count": valid.sum(-1),
        "terminated": rollout.terminated,
        "intervened": rollout.intervened.any(-1),
        "seed": rollout.seeds,
        "version": rollout.version,
        "task": task,
        "robot": torch.full_like(rollout.seeds, robot),
    }
    return columns | {FEATURES + name: item[:-1] for name, item in rollout.features.items()}


def _returns(columns: Columns, stop: np.ndarray, length: np.ndarray, gamma: float) -> Tensor:
    """The discounted sum from each decision to the end of its episode; -inf where that was truncated, 0 after it."""
    reward, powers = columns["reward"], gamma ** columns["count"]
    found = torch.zeros_like(reward)
    terminated = on_host(columns["terminated"])[stop - 1]
    for back in range(1, int(length.max()) + 1):
        index = torch.from_numpy(stop[length >= back] - back)
        unknown = torch.from_numpy(~terminated[length >= back])
        total = reward[index] + powers[index] * found[index + 1]
        found[index] = torch.where(unknown.to(total.device), -torch.inf, total)
    return found


class InMemory:
    """Columns as tensors on ``device``; all of them belong to the state of a run, which then resumes bit for bit.

    device  where sampled decisions go
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._capacity = self._used = 0

    def open(self, numbers: Numbers) -> tuple[Columns, Filled, Sequence[str]]:
        """Start with the replay buffer's ``numbers``, "capacity" among them, that give its columns their meaning.

        Returns the columns that exist already, which slots are filled, and the names of the robots.
        """
        self._capacity = int(numbers["capacity"])
        return {}, (0, 0, 0), ()

    def allocate(self, shapes: Shapes) -> Columns:
        """Columns of zeros, by name the shape and dtype of one slot."""
        return {
            name: torch.zeros(self._capacity, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    def note(self, filled: Filled, robots: Sequence[str]) -> None:
        """Remember which slots are filled, and the names of the robots."""
        self._used = min(self._capacity, filled[1] + filled[2])

    def state(self, columns: Columns) -> Columns:
        """The columns that belong to the state of a run; {} when the storage keeps them itself."""
        return {name: item[: self._used] for name, item in columns.items()}


class OnDisk(InMemory):
    """Columns as memory-mapped files in ``folder``: larger than memory, and available to the next process.

    A resumed run continues with the decisions in the files: none is lost, but the decisions that were added after its
    last saved state are still there, so the run is not repeated bit for bit.  The columns are on the host; sampled
    decisions go to ``device``.
    """

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        super().__init__(device)
        self.folder = Path(folder)
        self._meta: dict[str, Any] = {}

    def open(self, numbers: Numbers) -> tuple[Columns, Filled, Sequence[str]]:
        """Raises UserError for a folder of another contract version or other numbers, or one that is damaged."""
        wanted = {"contract_version": CONTRACT_VERSION, **numbers}
        path = self.folder / _META
        if not path.exists():
            self._meta = wanted
            return {}, (0, 0, 0), ()
        try:
            self._meta = read_json(path)
            made_with = {name: self._meta[name] for name in wanted}
            listed = self._meta["columns"].items()
            shapes = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in listed}
            cursor, size, running = (int(number) for number in self._meta["filled"])
            robots = [str(name) for name in self._meta["robots"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{str(path)!r} is damaged ({error!r}), so its decisions cannot be read; delete the folder."
            ) from error
        for name, value in wanted.items():
            if made_with[name] != value:
                raise UserError(
                    f"the replay buffer in {str(self.folder)!r} was made with {name} {made_with[name]} but this is "
                    f"{value}, so its decisions would be misread; choose another folder, or use {made_with[name]}."
                )
        return self._map(shapes), (cursor, size, running), robots

    def allocate(self, shapes: Shapes) -> Columns:
        self._meta["columns"] = {
            name: (list(shape), str(dtype).removeprefix("torch.")) for name, (shape, dtype) in shapes.items()
        }
        return self._map(shapes)

    def _map(self, shapes: Shapes) -> Columns:
        """Raises UserError when a file has another size or cannot be made."""
        columns, capacity = {}, int(self._meta["capacity"])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, (shape, dtype) in shapes.items():
                path, slot = self.folder / (name.replace("/", "__") + ".bin"), torch.Size(shape).numel()
                found, needed = path.stat().st_size if path.exists() else None, capacity * slot * dtype.itemsize
                if found is not None and found != needed:
                    raise UserError(
                        f"{str(path)!r} has {found} bytes where {needed} are needed, so its decisions would be "
                        "misread; delete the folder."
                    )
                flat = torch.from_file(str(path), shared=True, size=capacity * slot, dtype=dtype)
                columns[name] = flat.view(capacity, *shape)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the folder {str(self.folder)!r} cannot be used ({error}), so nothing was kept; free some disk "
                "space or choose another folder."
            ) from error
        return columns

    def note(self, filled: Filled, robots: Sequence[str]) -> None:
        meta = {**self._meta, "filled": list(filled), "robots": list(robots)}
        writing = self.folder / (_META + ".writing")
        writing.write_text(json.dumps(meta), encoding="utf-8")
        os.replace(writing, self.folder / _META)

    def state(self, columns: Columns) -> Columns:
        return {}
