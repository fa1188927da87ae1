"""The records that robots make here: everything of one follows from its robot, epoch and number."""

from __future__ import annotations

import random
from typing import Any

from vla_rl.contract import wire

EPISODE = 40  # records
_FIELDS = ("kind", "episode", "task", "policy_version", "intervened", "payload")


def fields_of(robot: str, epoch: str, seq: int) -> dict[str, Any]:
    """What record ``seq`` of a robot holds: steps of a few hundred bytes, some large, and an end of each episode."""
    draw = random.Random(f"{robot} {epoch} {seq}")
    size = 20_000 if seq % 97 == 0 else draw.randint(20, 600)
    return {
        "kind": "episode_end" if seq % EPISODE == EPISODE - 1 else "step",
        "episode": f"e{seq // EPISODE}",
        "task": draw.choice(("lift", "stack")),
        "policy_version": seq // 1000,
        "intervened": seq // EPISODE % 5 == 0,
        "payload": wire.pack({"seq": seq, "bytes": draw.randbytes(size)}),
    }


def is_known(record: Any) -> bool:
    """Whether ``record`` is the one of its number."""
    expected = fields_of(record.robot, record.epoch, record.seq)
    return all(getattr(record, name) == expected[name] for name in _FIELDS)
