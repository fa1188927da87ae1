"""Control steps of an arm as a fleet's records hold them: the columns that a recording on the robot would have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from robot_drivers.record import Record
from vla_rl.fleet.episode_end import EpisodeEnd
from vla_rl.fleet.step import FleetStep
from vla_rl.recipes.robots.recording import labels_of
from vla_rl.recipes.robots.session import ControlStep, outcome_of


def fleet_step(one: ControlStep, start: float) -> FleetStep:
    """What was seen and done in ``one``, of an episode whose first measurement was captured at ``start``."""
    labels = {name: np.asarray(value[0]) for name, value in labels_of([one.record], start).items()}
    images = {name: image[0] for name, image in one.obs.images.items()}
    action = one.record.executed.astype(np.float32)
    return FleetStep(images, np.asarray(one.obs.state)[0], int(one.obs.time[0]), action, labels)


def episode_end(records: Sequence[Record]) -> EpisodeEnd:
    """How the episode of ``records`` ended."""
    last = records[-1]
    return EpisodeEnd(
        outcome=outcome_of(records),
        steps=len(records),
        intervened=sum(record.intervened for record in records),
        clipped=sum(bool(record.clipped.any()) for record in records),
        seconds=float(last.captured - records[0].captured),
    )
