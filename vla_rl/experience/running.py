"""Whole episodes assembled from rollouts of one stream, whose windows may cut them anywhere; column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import on_host

FEATURES = "features/"
Columns: TypeAlias = dict[str, Tensor]


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
        """Nested dicts of tensors (see ``Resumable``)."""
        return {"columns": self.columns, "env_ids": torch.from_numpy(self.env_ids), "latest": self.latest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Running:
        """What :meth:`to_state` described."""
        return cls(dict(state["columns"]), on_host(state["env_ids"]), dict(state["latest"]))


def advance(running: Running, rollout: Rollout, gamma: float, robot: int) -> tuple[Columns, Running]:
    """Add ``rollout`` to the ``running`` episodes: the slots of those that ended, in the order of time, and the rest.

    An episode of ``n`` decisions takes ``n`` slots and one more for the observation after them.  An episode whose
    environment was reset before its end (the seed changes) counts as truncated at its latest known observation.  An end
    that came with a decision without valid actions (cause "worker") is that of the decision before it.
    """
    steps = _Steps.of(running, rollout, _Ends.of(running, rollout))
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
    return slots, _rest(rollout, table, steps, np.repeat(waiting, np.diff(first, append=len(steps.env_ids))))


@dataclass(frozen=True)
class _Ends:
    """Where episodes end: at the last decision of each that has a valid action.

    over     bool [T,E]
    final    int [T,E]   index into ``rollout.final_features`` of the observation after it, -1 without one
    running  bool [L]    of the decisions of running episodes
    """

    over: np.ndarray
    final: np.ndarray
    running: np.ndarray

    @classmethod
    def of(cls, running: Running, rollout: Rollout) -> _Ends:
        active, seeds = on_host(rollout.valid.any(-1)), on_host(rollout.seeds)
        over = on_host(rollout.terminated | rollout.truncated).copy()
        final = np.full(seeds.shape, -1)
        t, e = on_host(rollout.final_index).reshape(-1, 2).T
        final[t, e] = np.arange(len(t))
        found = cls(over, final, np.zeros(len(running.env_ids), bool))
        for time, env_id in np.argwhere(over & ~active).tolist():
            before = np.flatnonzero(active[:time, env_id])
            carried = np.flatnonzero(running.env_ids == env_id)
            if before.size and not over[before[-1], env_id] and seeds[before[-1], env_id] == seeds[time, env_id]:
                over[before[-1], env_id], final[before[-1], env_id] = True, final[time, env_id]
            elif not before.size and carried.size and int(running.columns["seed"][carried[-1]]) == seeds[time, env_id]:
                found.running[carried[-1]] = True
        return found


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
    def of(cls, running: Running, rollout: Rollout, ends: _Ends) -> _Steps:
        time, env_ids = np.nonzero(on_host(rollout.valid.any(-1)))
        known, envs = len(running.env_ids), rollout.seeds.shape[1]
        seeds = on_host(rollout.seeds)[time, env_ids]
        if known:
            seeds = np.concatenate([on_host(running.columns["seed"]), seeds])
        order = np.argsort(np.concatenate([running.env_ids, env_ids]), kind="stable")
        env, seed = np.concatenate([running.env_ids, env_ids])[order], seeds[order]
        ended = np.concatenate([ends.running, ends.over[time, env_ids]])[order]
        starts = np.ones(len(order), bool)
        starts[1:] = (env[1:] != env[:-1]) | ended[:-1] | (seed[1:] != seed[:-1])
        source = np.concatenate([np.arange(known), known + time * envs + env_ids])[order]
        final = np.concatenate([np.full(known, -1), ends.final[time, env_ids]])[order]
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


def _rest(rollout: Rollout, table: Columns, steps: _Steps, waiting: np.ndarray) -> Running:
    """The decisions where ``waiting``, whose episodes run on."""
    index, env_ids = torch.from_numpy(steps.source[waiting]), steps.env_ids[waiting]
    latest = {name: item[-1][torch.from_numpy(np.unique(env_ids))] for name, item in rollout.features.items()}
    return Running({name: item[index] for name, item in table.items()}, env_ids, latest)


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
