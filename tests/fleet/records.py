"""What robots of tests send: records of small episodes, and chains of records of any kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep, pack_introduction
from vla_rl.fleet.record import NO_HASH, FleetRecord

EPOCH = "0" * 31 + "1"
SPEC = EnvSpec(
    name="toy",
    images={"front": ArraySpec((4, 6, 3), "uint8", 0, 255)},
    state=ArraySpec((2,), "float32", -1.0, 1.0, "rad", names=("a.pos", "b.pos")),
    action=ArraySpec((2,), "float32", -1.0, 1.0, "rad", names=("a.pos", "b.pos")),
    tasks=("lift",),
    control_dt=0.1,
    time_limit=100,
    max_chunk=8,
)


def step(time: int) -> FleetStep:
    """A control step whose numbers are all different from those of another time."""
    image = np.full((4, 6, 3), time, np.uint8)
    labels = {"latency": np.array(0.5, np.float32), "clipped": np.array([True, False])}
    numbers = np.array([time, -time], np.float32) / 100
    return FleetStep({"front": image}, numbers, time, numbers / 2, labels)


def introduction() -> FleetRecord:
    """What a robot sends first."""
    return FleetRecord(robot="arm", epoch=EPOCH, seq=0, kind="event", previous=NO_HASH, payload=pack_introduction(SPEC))


def episode(name: str, steps: int, outcome: str = "success", version: int = 1) -> Iterator[FleetRecord]:
    """The records of a whole episode, not yet numbered."""
    like = replace(introduction(), kind="step", episode=name, task="lift", policy_version=version)
    for time in range(steps):
        yield replace(like, payload=step(time).payload(LOSSLESS))
    yield replace(like, kind="episode_end", payload=EpisodeEnd(outcome, steps, 0, steps, steps / 10).payload())


def chained(records: Iterable[FleetRecord]) -> list[FleetRecord]:
    """The records as one robot numbers and chains them."""
    chain: list[FleetRecord] = []
    for record in records:
        chain.append(replace(record, seq=len(chain), previous=chain[-1].hash if chain else NO_HASH))
    return chain


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


def recorded(
    spec: EnvSpec, shown: Demonstrations, person: Collection[int] = (), version: int = 1, robot: str = "arm"
) -> list[FleetRecord]:
    """What a robot would send of the episodes ``shown``; a person acted in their steps number ``person``."""
    first = replace(introduction(), robot=robot, policy_version=version, payload=pack_introduction(spec))
    made = [first]
    for number, (begin, end) in enumerate(shown.spans()):
        like = replace(first, kind="step", episode=f"e{number}", task=shown.tasks[shown.task[begin]])
        for i in range(begin, end):
            images, acted = {name: item[i] for name, item in shown.images.items()}, i - begin in person
            sent = FleetStep(images, shown.state[i], i - begin, shown.action[i], {"intervention": np.array(acted)})
            made.append(replace(like, intervened=acted, payload=sent.payload(LOSSLESS)))
        said = EpisodeEnd("success", end - begin, len({*person} & {*range(end - begin)}), 0, float(end - begin))
        made.append(replace(like, kind="episode_end", payload=said.payload()))
    return chained(made)
