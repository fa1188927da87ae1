"""What a policy is asked while it drives a robot, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from vla_rl.contract.env import Observation


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
