"""What a robot would send of episodes that a script has collected."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from vla_rl.contract.env import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep, pack_introduction
from vla_rl.fleet.record import NO_HASH, FleetRecord

EPOCH = "0" * 31 + "1"


def records(
    spec: EnvSpec, episodes: Demonstrations, person: Collection[int] = (), version: int = 1, robot: str = "arm"
) -> list[FleetRecord]:
    """The records of ``episodes``, numbered and chained; a person acted in their steps number ``person``."""
    made: list[FleetRecord] = []
    for kind, payload, fields in _records(spec, episodes, person):
        given = {"kind": kind, "payload": payload, "policy_version": version, **fields}
        previous = made[-1].hash if made else NO_HASH
        made.append(FleetRecord(robot=robot, epoch=EPOCH, seq=len(made), previous=previous, **given))
    return made


def _records(spec: EnvSpec, shown: Demonstrations, person: Collection[int]) -> Iterator[tuple[str, bytes, dict]]:
    yield "event", pack_introduction(spec), {}
    for number, (begin, end) in enumerate(shown.spans()):
        fields = {"episode": f"e{number}", "task": shown.tasks[shown.task[begin]]}
        for i in range(begin, end):
            images = {name: item[i] for name, item in shown.images.items()}
            labels = {"intervention": np.array(i - begin in person)}
            step = FleetStep(images, shown.state[i], i - begin, shown.action[i], labels)
            yield "step", step.payload(LOSSLESS), {**fields, "intervened": i - begin in person}
        said = EpisodeEnd("success", end - begin, len({*person} & {*range(end - begin)}), 0, float(end - begin))
        yield "episode_end", said.payload(), fields
