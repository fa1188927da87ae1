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
from collections.abc import Sequence

import numpy as np

from robot_drivers.driver import Measurement, copied, is_number, numbers_of
from robot_drivers.kinematics import Chain
from robot_drivers.limiting import REASONS, Command, Request, SafetyState, limit
from robot_drivers.limits import Limits
from vla_rl.contract.errors import ContractError

__all__ = ["REASONS", "Command", "Request", "SafetyState", "Supervisor", "limit"]
PLAUSIBLE = 1.5  # times the hardware's speed, as a measured motion
NOISE = 0.02  # of a joint's range, on top
STEPS = 2.0  # control periods, at most, in which it may have moved so
GAP = 1.0  # s between two steps, after which nobody knows what became of the arm meanwhile


class Supervisor:
    """Decides which requests are listened to and when the arm is brought to rest; every command goes through it.

    A request is refused when it is not finite, of another shape, older than ``max_age``, from the future, not newer
    than the last one of its source, or stamped before the last re-arming.  The last one that was accepted is followed
    for ``watchdog`` seconds, then the arm is brought to rest; it moves again with the next acceptable request.

    A stop is latched until :meth:`rearm`.  It comes from :meth:`stop`, from a clock that runs backwards or on by more
    than ``GAP``, and from a measurement that is not finite, of another shape, older than ``max_age``, from the future,
    or farther from the last one than the hardware can move in two control periods, however long ago that was.  While
    the measurement is wrong, the last command is held.  A joint that is measured to move faster than its limit for
    longer than a moment (:class:`Overspeed`) stops the arm as well.

    An arm that is measured far from its last command is not re-armed unless a person says that it is there.
    Everything that comes in is copied.

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
        self._elsewhere = ""

    @property
    def elsewhere(self) -> str:
        """Which joint is measured where, far from its command, so that only a person can say whether it is there; ""
        for an arm that is where it was sent.
        """
        return self._elsewhere

    def stop(self, reason: str) -> None:
        """Bring the arm to rest and hold it until :meth:`rearm`; the first reason stays."""
        self.stopped = self.stopped or reason or "stopped"

    def rearm(self, now: float, there: np.ndarray | None = None) -> None:
        """A person allows motion again; only requests stamped after ``now`` are listened to.

        ``there`` [D] is where the person sees the arm, if that is :attr:`elsewhere`: measurements near it are believed
        again.  Without it such an arm stays stopped.
        """
        if not (math.isfinite(now) and now >= self._now):
            raise ContractError(
                f"Re-arming at {now!r} s is before the last step at {self._now!r} s, so old requests would be "
                "followed; give time.monotonic()."
            )
        if there is not None and self._state is not None:
            seen = numbers_of(there, len(self.limits.joints))
            if seen is None or not np.isfinite(seen).all():
                raise ContractError(
                    f"The arm is said to be at {there!r}, which is no position of {len(self.limits.joints)} joints, so "
                    "it stays stopped; confirm where it is measured."
                )
            self._state, self._elsewhere = dataclasses.replace(self._state, measured=seen), ""
            self._overspeed = Overspeed(self.limits)
        self._followed, self._armed = None, now
        self.stopped = f"it is not where it was sent ({self._elsewhere})" if self._elsewhere else ""

    def step(
        self, measurement: Measurement | None, request: Request | None, now: float, deadman_at: float | None = None
    ) -> Command:
        """The command that is safe to send at ``now``.

        ``measurement`` is the newest one, None when nothing new came; ``deadman_at`` when the deadman switch was last
        seen pressed.  Raises ContractError while nothing was measured yet: no command is safe then.
        """
        elapsed = self._tick(now)
        state = self._measured(measurement)
        asked = None if request is None else numbers_of(request.position, len(self.limits.joints))
        refused = "" if request is None else self._refusal(request, asked)
        if request is not None and asked is not None and not refused:
            self._followed, self._accepted = Request(asked, float(request.stamp), request.source), self._now
            self._stamps[request.source] = float(request.stamp)
        halt = self._halt(deadman_at)
        command, self._state = limit(state, None if halt else self._followed, elapsed)
        reason = refused if halt in ("", "no request") and refused else halt
        return self._reported(command, request is not None, asked, reason)

    def _tick(self, now: float) -> float:
        """Seconds since the last step."""
        before, self._now = self._now, now if math.isfinite(now) else self._now
        if math.isfinite(now) and (now >= before):
            elapsed = now - before if math.isfinite(before) else 0.0
            if elapsed > GAP:
                self.stop(f"nobody controlled the arm for {elapsed:.1f} s")
            return elapsed
        self.stop("the clock ran backwards")
        self._captured = min(self._captured, self._now)
        self._stamps = {source: min(stamp, self._now) for source, stamp in self._stamps.items()}
        self._overspeed = Overspeed(self.limits)  # what it has seen was at times that are yet to come
        return 0.0

    def _measured(self, measurement: Measurement | None) -> SafetyState:
        """The state with what is measured now; without a trustworthy measurement the command stands for it."""
        measurement = measurement and copied(measurement, len(self.limits.joints))
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
        self._elsewhere = self._far(measurement.position, [joint.lead for joint in self.limits.joints])
        self._captured = measurement.captured
        if fast := self._overspeed.seen(measurement):
            self.stop(fast)
        return dataclasses.replace(self._state, measured=measurement.position)

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
        time = min(captured - self._captured, STEPS / self.limits.control_hz)
        reach = [PLAUSIBLE * joint.fastest * time for joint in joints]
        noise = [NOISE * (joint.high - joint.low) for joint in joints]
        if (abs(measurement.position - self._state.measured) <= np.add(reach, noise)).all():
            return ""
        self._elsewhere = self._far(measurement.position, reach)
        return "jumped"

    def _far(self, position: np.ndarray, reach: Sequence[float]) -> str:
        """Which joint is measured farther than ``reach`` [D] from its command, and where; "" for none."""
        assert self._state is not None
        away = abs(position - self._state.position)
        for joint, off, there, far in zip(self.limits.joints, away, position, reach, strict=True):
            if off > far + NOISE * (joint.high - joint.low):
                return f"{joint.name} is measured at {there:.3g}, {off:.2g} away"
        return ""

    def _refusal(self, request: Request, asked: np.ndarray | None) -> str:
        """Why the request for ``asked`` is refused, "" where it is not."""
        if asked is None:
            return "shape"
        if not (np.isfinite(asked).all() and is_number(request.stamp)):
            return "not finite"
        if not isinstance(request.source, str) or request.source not in self._stamps:
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

    def _reported(self, command: Command, requested: bool, asked: np.ndarray | None, reason: str) -> Command:
        """The command beside what was asked for, counted."""
        if requested:
            asked = np.full(len(self.limits.joints), np.nan) if asked is None else asked
            command = dataclasses.replace(command, requested=asked, clipped=command.position != asked)
        elif command.requested is not None:  # the last request is followed on
            command = dataclasses.replace(command, requested=None, clipped=np.zeros_like(command.clipped))
        command = dataclasses.replace(command, reason=reason or command.reason)
        self.counts[command.reason] += 1
        self.clipped += command.clipped
        return command


SHARE = 1.5  # times a joint's velocity limit: a servo overshoots while it catches up
VELOCITY_NOISE = 0.1  # of a joint's range per second, on top: differences of measured positions are rough
LASTS = 0.15  # s; a shorter burst is a servo's, or noise


class Overspeed:
    """Looks at one measurement after the other; the larger counts of the velocity that the robot measures, if it does,
    and the difference of its positions: a register may be stuck.
    """

    def __init__(self, limits: Limits) -> None:
        self._names = [joint.name for joint in limits.joints]
        self._fastest = np.array(
            [SHARE * joint.velocity + VELOCITY_NOISE * (joint.high - joint.low) for joint in limits.joints]
        )
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
