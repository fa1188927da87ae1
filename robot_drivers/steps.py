"""Control steps of a robot as the steps of the environment contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from robot_drivers.record import Record
from vla_rl.contract.env import Observation, Step

TERMINAL = ("success", "failure")
"""Outcomes by the task; all others end an episode from outside."""


def step_of(records: Sequence[Record], frames: Sequence[Observation], horizon: int, ended: str = "") -> Step:
    """The step that consists of the control steps ``records``, of which ``frames`` are the observations after each.

    ``horizon`` actions were asked for; those that were not executed are not valid.  The reward of the last one is 1 if
    a person, or the robot, judged the episode a success.  ``ended`` is why it ended if no record says so.
    """
    count, outcome = len(records), ended or (records[-1].outcome if records else "")
    executed = np.zeros((1, horizon, frames[-1].state.shape[1]), np.float32)  # one action for each joint
    reward, valid, intervened = (np.zeros((1, horizon), kind) for kind in (np.float32, bool, bool))
    valid[0, :count] = True
    intervened[0, :count] = [record.intervened for record in records]
    if records:
        executed[0, :count] = [record.executed for record in records]
        reward[0, count - 1] = outcome == "success"
    return Step(
        frames[-1],
        reward,
        valid,
        terminated=np.array([outcome in TERMINAL]),
        truncated=np.array([bool(outcome) and outcome not in TERMINAL]),
        cause=(outcome,),
        success=np.array([outcome == "success"]),
        executed=executed,
        intervened=intervened,
        frames=(*frames, *[frames[-1]] * (horizon - count)),
    )
