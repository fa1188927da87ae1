"""The supervisor: what stands between every request and the motors, whoever asks.

:func:`limit` makes the next command (``limiting.py``); :class:`Supervisor` decides which requests are listened to,
and when the arm is brought to rest.  Times are arguments, in seconds of ``time.monotonic``.

This is software on an ordinary computer.  It is no substitute for a safety-rated stop (ISO 10218-1): keep a switch
that cuts the motors' power within reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np

from robot_drivers.driver import Measurement
from robot_drivers.kinematics import Chain
from robot_drivers.limiting import REASONS, Command, Request, SafetyState, limit
from robot_drivers.limits import Limits
from robot_drivers.overspeed import Overspeed
from vla_rl.contract.errors import ContractError

__all__ = ["REASONS", "Command", "Request", "SafetyState", "Supervisor", "limit"]
PLAUSIBLE = 1.5  # times the hardware's speed, as a measured motion
NOISE = 0.02  # of a joint's range, on top


class Supervisor:
    """Decides which requests are listened to and when the arm is brought to rest; every command goes through it.

    A request is refused when it is not finite, of another shape, older than ``max_age``, from the future, not newer
    than the last one of its source, or stamped before the last re-arming.  The last one that was accepted is followed
    for ``watchdog`` seconds, then the arm is brought to rest; it moves again with the next acceptable request.

    A stop is latched until :meth:`rearm`.  It comes from :meth:`stop`, from a clock that runs backwards, and from a
    measurement that is not finite, of another shape, older than ``max_age``, from the future, or farther from the
    last one than the hardware can move.  While the measurement is wrong, the last command is held.  A joint that is
    measured to move faster than its limit for longer than a moment (``overspeed.py``) stops the arm as well.

    ``counts``   steps by reason
    ``clipped``  int64 [D], steps in which a joint was not sent where it was asked to be
    ``stopped``  why the arm is stopped, "" while it is not
    """

    def __init__(self, limits: Limits, kinematics: Chain | None = None) -> None:
        SafetyState.at_rest(limits, np.zeros(len(limits.joints)), kinematics)  # refuse now what does not fit
        self.limits, self.kinematics = limits, kinematics
        self.counts: Counter[str] = Counter()
        self.clipped = np.zeros(len(limits.joints), np.int64)
        self.stopped = ""
        self._state: SafetyState | None = None
        self._overspeed = Overspeed(limits)
        self._now = self._armed = -math.inf
        self._captured = -math.inf
        self._stamps: dict[str, float] = {"policy": -math.inf, "human": -math.inf}
        self._followed: Request | None = None
        self._accepted = -math.inf

    def stop(self, reason: str) -> None:
        """Bring the arm to rest and hold it until :meth:`rearm`; the first reason stays."""
        self.stopped = self.stopped or reason or "stopped"

    def rearm(self, now: float) -> None:
        """A person allows motion again; only requests stamped after ``now`` are listened to."""
        if not (math.isfinite(now) and now >= self._now):
            raise ContractError(
                f"Re-arming at {now!r} s is before the last step at {self._now!r} s, so old requests would be "
                "followed; give time.monotonic()."
            )
        self.stopped, self._followed, self._armed = "", None, now

    def step(
        self, measurement: Measurement | None, request: Request | None, now: float, deadman_at: float | None = None
    ) -> Command:
        """The command that is safe to send at ``now``.

        ``measurement`` is the newest one, None when nothing new came; ``deadman_at`` when the deadman switch was last
        seen pressed.  Raises ContractError while nothing was measured yet: no command is safe then.
        """
        elapsed = self._tick(now)
        state = self._measured(measurement)
        refused = "" if request is None else self._refusal(request)
        if request is not None and not refused:
            self._followed, self._accepted = request, self._now
            self._stamps[request.source] = request.stamp
        halt = self._halt(deadman_at)
        command, self._state = limit(state, None if halt else self._followed, elapsed)
        return self._reported(command, request, refused if halt in ("", "no request") and refused else halt)

    def _tick(self, now: float) -> float:
        """Seconds since the last step."""
        before, self._now = self._now, now if math.isfinite(now) else self._now
        if math.isfinite(now) and (now >= before):
            return now - before if math.isfinite(before) else 0.0
        self.stop("the clock ran backwards")
        self._captured = min(self._captured, self._now)
        return 0.0

    def _measured(self, measurement: Measurement | None) -> SafetyState:
        """The state with what is measured now; without a trustworthy measurement the command stands for it."""
        wrong = self._wrong(measurement)
        if self._state is None:
            if wrong or measurement is None:
                trouble = "is missing" if measurement is None else wrong
                raise ContractError(
                    f"The arm's first measurement {trouble}, so no command to it is safe; send nothing and measure "
                    "again."
                )
            self._state = SafetyState.at_rest(self.limits, measurement.position, self.kinematics)
        if wrong:
            self.stop(f"the measurement {wrong}")
            return dataclasses.replace(self._state, measured=self._state.position)
        if measurement is None:
            return self._state
        self._captured = measurement.captured
        if fast := self._overspeed.seen(measurement):
            self.stop(fast)
        return dataclasses.replace(self._state, measured=np.array(measurement.position, np.float64))

    def _wrong(self, measurement: Measurement | None) -> str:
        """What is wrong with the newest measurement, "" for nothing."""
        if measurement is None:
            return "is stale" if self._now - self._captured > self.limits.max_age else ""
        joints, captured = self.limits.joints, measurement.captured
        for array in (measurement.position, measurement.velocity):
            if array is not None and np.shape(array) != (len(joints),):
                return "has another shape"
            if array is not None and not np.isfinite(array).all():
                return "is not finite"
        if not captured <= self._now:
            return "is from the future"
        if not self._now - captured <= self.limits.max_age:
            return "is stale"
        if captured < self._captured:
            return "is older than the one before"
        if self._state is None:
            return ""
        reach = [
            PLAUSIBLE * joint.fastest * (captured - self._captured) + NOISE * (joint.high - joint.low)
            for joint in joints
        ]
        return "jumped" if (abs(measurement.position - self._state.measured) > reach).any() else ""

    def _refusal(self, request: Request) -> str:
        """Why the request is refused, "" where it is not."""
        try:
            position = np.asarray(request.position, np.float64)
        except (TypeError, ValueError):
            return "shape"
        if position.shape != (len(self.limits.joints),):
            return "shape"
        if not (np.isfinite(position).all() and math.isfinite(request.stamp)):
            return "not finite"
        if request.source not in self._stamps:
            return "source"
        if request.stamp > self._now:
            return "from the future"
        if request.stamp <= self._armed:
            return "before re-arming"
        if request.stamp <= self._stamps[request.source]:
            return "out of order"
        return "stale" if self._now - request.stamp > self.limits.max_age else ""

    def _halt(self, deadman_at: float | None) -> str:
        """Why the arm is to be at rest, "" where it may move."""
        if self.stopped:
            return "stopped"
        if self.limits.deadman and not (deadman_at is not None and 0 <= self._now - deadman_at <= self.limits.watchdog):
            self._followed = None
            return "deadman"
        if self._followed is None:
            return "no request"
        if self._now - self._accepted > self.limits.watchdog:
            self._followed = None
            return "watchdog"
        return ""

    def _reported(self, command: Command, request: Request | None, reason: str) -> Command:
        """The command beside what was asked for, counted."""
        if request is not None:
            asked = _as_asked(request, len(self.limits.joints))
            command = dataclasses.replace(command, requested=asked, clipped=command.position != asked)
        elif command.requested is not None:  # the last request is followed on
            command = dataclasses.replace(command, requested=None, clipped=np.zeros_like(command.clipped))
        command = dataclasses.replace(command, reason=reason or command.reason)
        self.counts[command.reason] += 1
        self.clipped += command.clipped
        return command


def _as_asked(request: Request, joints: int) -> np.ndarray:
    """The request as float64 [D], NaN where it is no such thing."""
    try:
        asked = np.array(request.position, np.float64)
    except (TypeError, ValueError):
        asked = np.zeros(0)
    return asked if asked.shape == (joints,) else np.full(joints, np.nan)
