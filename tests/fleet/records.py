"""Chains of records for tests."""

from __future__ import annotations

from typing import Any

from vla_rl.fleet.record import NO_HASH, FleetRecord

EPOCH = "0" * 31 + "a"


def chain(count: int, robot: str = "arm", epoch: str = EPOCH, size: int = 20, **fields: Any) -> list[FleetRecord]:
    """``count`` records that follow each other, each with a payload of its own."""
    return follow([], count, robot, epoch, size, **fields)


def follow(
    records: list[FleetRecord], count: int, robot: str = "arm", epoch: str = EPOCH, size: int = 20, **fields: Any
) -> list[FleetRecord]:
    """``count`` records behind ``records``."""
    found: list[FleetRecord] = []
    last = records[-1].last if records else -1
    previous = records[-1].hash if records else NO_HASH
    for seq in range(last + 1, last + 1 + count):
        payload = (f"{robot} {seq} ".encode() * size)[:size]
        values: dict[str, Any] = {"kind": "step", "payload": payload, "episode": "e0", **fields}
        found.append(FleetRecord(robot=robot, epoch=epoch, seq=seq, previous=previous, **values))
        previous = found[-1].hash
    return found
