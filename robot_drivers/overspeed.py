"""Whether the arm, as it is measured, moves faster than it may: it falls, is pushed, or does not do what it is sent."""

from __future__ import annotations

import numpy as np

from robot_drivers.driver import Measurement
from robot_drivers.limits import Limits

SHARE = 1.5  # times a joint's velocity limit: a servo overshoots while it catches up
NOISE = 0.1  # of a joint's range per second, on top: differences of measured positions are rough
LASTS = 0.15  # s; a shorter burst is a servo's, or noise


class Overspeed:
    """Looks at one measurement after the other; the larger counts of the velocity that the robot measures, if it does,
    and the difference of its positions: a register may be stuck.
    """

    def __init__(self, limits: Limits) -> None:
        self._names = [joint.name for joint in limits.joints]
        self._fastest = np.array([SHARE * joint.velocity + NOISE * (joint.high - joint.low) for joint in limits.joints])
        self._last: Measurement | None = None
        self._since = np.full(len(self._names), np.inf)  # when each joint began to be too fast

    def seen(self, measurement: Measurement) -> str:
        """What is too fast for longer than ``LASTS``, "" for nothing; ``measurement`` is one that can be trusted."""
        before = self._last
        if before is None or measurement.captured <= before.captured:
            self._last = before or measurement
            return ""
        self._last, said = measurement, measurement.velocity
        velocity = (measurement.position - before.position) / (measurement.captured - before.captured)
        if said is not None:
            velocity = np.where(np.abs(said) > np.abs(velocity), said, velocity)
        fast = np.abs(velocity) > self._fastest
        self._since = np.where(fast, np.minimum(self._since, before.captured), np.inf)
        lasting = measurement.captured - self._since > LASTS
        if not lasting.any():
            return ""
        joint = int(np.argmax(lasting))
        return (
            f"{self._names[joint]} moves at {abs(velocity[joint]):.2g}/s, faster than the {self._fastest[joint]:.2g}/s "
            "that its limit allows for"
        )
