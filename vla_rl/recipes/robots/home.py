"""The way to an arm's home, between episodes: straight in joint space, slow, through the supervisor."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from robot_drivers.approach import approach
from robot_drivers.control_process import ControlProcess
from robot_drivers.decisions import Decision, Query
from robot_drivers.limits import Limits
from robot_drivers.runtime import Observe, Runtime

SPEED = 0.25  # share of the velocity limits, at most
_NEAR = 0.03  # share of a joint's range by which an arm may miss its home, because it sags
_SETTLED = 0.5  # s for which the arm has to stand still: at home, or where something holds it
_STILL = 0.02  # share of the way that it would go meanwhile, at most
_SPARE = 3.0  # s, beyond twice what the way takes, until it is given up
_NUMBER = 1 << 40  # of these episodes, which nobody records


class Home:
    """Where an arm waits between episodes (``decisions.Decide``: on the rest of the way to there).

    position  [D], in the joints' units
    limits    of the arm; its velocities are those of a run, of which the way has a quarter at most
    """

    def __init__(self, position: np.ndarray, limits: Limits, control_dt: float) -> None:
        self._position, self._dt = position, control_dt
        self._names = [joint.name for joint in limits.joints]
        self._velocity = np.array([joint.velocity for joint in limits.joints])
        self._range = np.array([joint.high - joint.low for joint in limits.joints])

    def __call__(self, query: Query) -> Decision:
        """Chunk [H,D] from where the arm is seen to its home, which is then held: a way planned anew would swing it."""
        way = self._way(np.asarray(query.obs.state[0], np.float64))
        return Decision(np.concatenate([way, np.repeat(way[-1:], math.ceil(2 * _SETTLED / self._dt), axis=0)]))

    def missed(self, position: np.ndarray) -> str:
        """Which joint is how far from home, of an arm at ``position`` [D]; "" for one that is there."""
        away = position - self._position
        worst = int(np.argmax(np.abs(away) / self._range))
        far = abs(away[worst]) > _NEAR * self._range[worst]
        return f"{self._names[worst]} is {away[worst]:+.3g} from home" if far else ""

    def go(self, control: ControlProcess, observe: Observe) -> None:
        """Move the arm there; returns when it is, when it is stopped, and when that takes far too long.

        A person may take over meanwhile, and then decides where the arm is.  Raises what ``Runtime.episode`` does.
        """
        steps = 2 * len(self._way(control.newest().record.position)) + math.ceil(_SPARE / self._dt)
        seen: deque[np.ndarray] = deque(maxlen=1 + math.ceil(_SETTLED / self._dt))  # since the arm was sent home
        with Runtime(control, self, observe) as runtime:
            for moment in runtime.episode(_NUMBER, steps):
                if seen or moment.record.source == "policy":
                    seen.append(moment.record.position)
                if runtime.stopped or (len(seen) == seen.maxlen and self._still(seen[0], seen[-1])):
                    control.end("home")

    def _still(self, before: np.ndarray, after: np.ndarray) -> bool:
        return bool((np.abs(after - before) <= _STILL * _SETTLED * self._velocity).all())

    def _way(self, start: np.ndarray) -> np.ndarray:
        return approach(start, self._position, self._velocity, self._dt)
