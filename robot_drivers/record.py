"""What happened in one control step: the labels that every frame of a recorded episode carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SOURCES = ("policy", "human", "safety", "hold")
"""Who chose the executed position: in a dataset, ``source`` is an index into this."""


@dataclass(frozen=True)
class Record:
    """One control step of an arm with ``D`` joints, in the joints' units and seconds of ``time.monotonic``.

    step            number of the control step since the process began
    episode         number of the episode, from 1; 0 between episodes
    captured        when ``position`` was measured
    position        float64 [D]  measured before the command
    velocity        float64 [D]  measured, or the difference of the last two positions where the robot measures none
    requested       float64 [D]  what the policy or the person asked for; NaN where nobody asked for anything
    executed        float64 [D]  what was sent to the robot, after the supervisor and the driver
    clipped         bool [D]     joints whose request was changed
    source          one of ``SOURCES``
    reason          why the request was changed or refused; "" if it was not
    policy_version  of the policy whose action was executed; -1 for others
    chunk           step of the observation on which its chunk was decided; -1 for others
    step_in_chunk   index of the action in that chunk; -1 for others
    latency         seconds between the capture of what was decided on and the command; 0 where nobody decided
    intervention    number of the intervention, from 1, during which this was executed; 0 for none
    outcome         "success", "failure", "redo" or a simulator's cause at the last step of an episode, otherwise ""
    asks            whether the next chunk should be decided on this step's observation
    consumed        how many actions of the newest chunk belong to earlier steps; -1 where none counts any more
    heard           step of the observation on which the chunk was decided that came last; -1 before the first
    """

    step: int
    episode: int
    captured: float
    position: np.ndarray
    velocity: np.ndarray
    requested: np.ndarray
    executed: np.ndarray
    clipped: np.ndarray
    source: str
    reason: str
    policy_version: int
    chunk: int
    step_in_chunk: int
    latency: float
    intervention: int
    outcome: str
    asks: bool
    consumed: int
    heard: int

    @property
    def intervened(self) -> bool:
        """Whether a person holds control in this step."""
        return self.intervention > 0

    def to_message(self) -> dict[str, Any]:
        """For ``contract.wire``."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Record:
        """The record that was sent."""
        return cls(**message)
