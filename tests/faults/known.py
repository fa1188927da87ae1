"""The records that robots make here: everything of one follows from its robot, epoch and number.

A robot introduces itself, then plays episodes of forty records, which a learner can read.  The actions of a step say
which one it is.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np

from vla_rl.contract import wire
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep, pack_introduction

EPISODE = 40  # records
LARGE = 97  # every so many records there is an event of 20 kB
_UNIT = 1 << 24  # numbers below it are exact in float32
_FIELDS = ("kind", "episode", "task", "policy_version", "intervened", "payload")
_BOUNDS = ArraySpec((2,), "float32", -1.0, 1.0, "rad", names=("a.pos", "b.pos"))
SPEC = EnvSpec(
    name="toy",
    images={"front": ArraySpec((16, 16, 3), "uint8", 0, 255)},
    state=_BOUNDS,
    action=_BOUNDS,
    tasks=("lift", "stack"),
    control_dt=0.1,
    time_limit=100,
    max_chunk=8,
)


def fields_of(robot: str, epoch: str, seq: int) -> dict[str, Any]:
    """What record ``seq`` of a robot holds: steps of a few hundred bytes, some large events, ends of episodes."""
    if seq == 0:
        return dict(zip(_FIELDS, ("event", "", "", 0, False, _introduction()), strict=True))
    number, place = divmod(seq - 1, EPISODE)
    played = random.Random(f"{robot} {epoch} e{number}")
    task, label_size = played.choice(SPEC.tasks), played.randint(20, 600)
    person = number % 5 == 0
    if place == EPISODE - 1:
        kind, payload = "episode_end", _end(steps_in(seq), person)
    elif seq % LARGE == 0:
        noise = random.Random(f"{robot} {epoch} {seq}").randbytes(20_000)
        kind, payload = "event", wire.pack({"event": "note", "bytes": noise})
    else:
        noise = random.Random(f"{robot} {epoch} {seq}").randbytes(label_size)
        kind, payload = "step", step(epoch, seq, steps_in(seq), noise).payload(LOSSLESS)
    return dict(zip(_FIELDS, (kind, f"e{number}", task, seq // 1000, person, payload), strict=True))


def steps_in(seq: int) -> int:
    """How many control steps the episode of record ``seq`` has before it."""
    begin = seq - (seq - 1) % EPISODE
    return seq - begin - len(range(begin + -begin % LARGE, seq, LARGE))


def step(epoch: str, seq: int, time: int, noise: bytes = b"") -> FleetStep:
    """A control step whose action says what it is; see :func:`identity`."""
    action = np.array([seq, epoch_number(epoch)], np.float32) / _UNIT
    labels = {"noise": np.frombuffer(noise, np.uint8)}
    return FleetStep({"front": _picture(time % 8)}, np.full(2, time / 100, np.float32), time, action, labels)


def epoch_number(epoch: str) -> int:
    """What an action says of an epoch."""
    return int(epoch[:6], 16)


def identity(robot: str, actions: Collection[Collection[float]]) -> str:
    """Of an episode whose control steps have these actions, in any order: robot, epoch, first and last step, count."""
    numbers = np.unique(np.round(np.array(list(actions), np.float64) * _UNIT).astype(np.int64), axis=0)
    epochs = "+".join(str(one) for one in np.unique(numbers[:, 1]))
    return f"{robot} {epochs} {numbers[0, 0]} {numbers[-1, 0]} {len(numbers)}"


def is_known(record: Any) -> bool:
    """Whether ``record`` is the one of its number."""
    expected = fields_of(record.robot, record.epoch, record.seq)
    return all(getattr(record, name) == expected[name] for name in _FIELDS)


@lru_cache
def _introduction() -> bytes:
    return pack_introduction(SPEC)


@lru_cache
def _picture(number: int) -> np.ndarray:
    return np.full((16, 16, 3), 30 * number, np.uint8)


def _end(steps: int, person: bool) -> bytes:
    outcome = "success" if person or steps % 2 else "time limit"
    return EpisodeEnd(outcome, steps, steps if person else 0, 0, steps / 10).payload()
