"""What passes between an arm, its policy and a person: queries, decisions, inputs, and the labels of control steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from vla_rl.contract.env import Observation

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


@dataclass(frozen=True)
class Query:
    """The observation of one control step, of which a chunk is wanted.

    obs       one environment: arrays [1,...]
    step      the control step of ``obs``; the chunk's first action is for it
    consumed  how many actions of the policy's last chunk belong to steps before ``step``; None where no chunk counts:
              at the start of an episode, after an intervention or a stop.  The policy begins anew then
    delay     how many steps will probably pass until the chunk arrives: its first ``delay`` actions come too late
    """

    obs: Observation
    step: int
    consumed: int | None
    delay: int


@dataclass(frozen=True)
class Decision:
    """A chunk float [H,D] in physical units, and the version of the policy that made it."""

    chunk: np.ndarray
    policy_version: int = 0


Decide: TypeAlias = Callable[[Query], Decision]


@dataclass(frozen=True)
class ControlStep:
    """One control step: what was seen before it, its labels, and why the arm is stopped ("" while it is not)."""

    obs: Observation
    record: Record
    stopped: str = ""


@dataclass(frozen=True)
class HumanInput:
    """What a teleoperator reads at one moment.

    captured   seconds of ``time.monotonic`` when it was read
    engaged    whether the person holds control
    position   float64 [D]  of a leader arm, in the joints' units; None for devices that steer
    velocity   float64 [D]  per second, of devices that steer (keyboard, gamepad); None for a leader
    keys       what was pressed since the last input: "success", "failure", "redo", "stop", "rearm",
               "ready" (for the next episode)
    deadman_at when the enabling switch was last seen pressed; None if there is none or it never was
    """

    captured: float
    engaged: bool = False
    position: np.ndarray | None = None
    velocity: np.ndarray | None = None
    keys: tuple[str, ...] = ()
    deadman_at: float | None = None
