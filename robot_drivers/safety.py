"""The supervisor: what stands between every request and the motors, whoever asks.

:class:`Supervisor` decides which requests are listened to, and when the arm is brought to rest; :func:`limit` makes the
next command.  Times are arguments, in seconds of ``time.monotonic``.

The commands are samples of one smooth function of time for each joint, whose position, velocity, acceleration and
jerk are within the limits, and which comes to rest within them if nobody asks for anything any more (``motion.py``).
So it does not matter when, or how irregularly, they are made.  They stay near the *measured* position: an arm that
lags or is blocked holds its command back.

This is software on an ordinary computer.  It is no substitute for a safety-rated stop (ISO 10218-1): keep a switch
that cuts the motors' power within reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robot_drivers.driver import Measurement, copied, is_number, numbers_of
from robot_drivers.kinematics import Chain
from robot_drivers.limits import Box, JointLimits, Limits
from robot_drivers.motion import Course, JointBounds, Motion, RateBounds, steer
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
    ``elsewhere``  which joint is measured where, far from its command, so that only a person can say whether it is
    there; "" for an arm that is where it was sent
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
        self.elsewhere = ""

    def stop(self, reason: str) -> None:
        """Bring the arm to rest and hold it until :meth:`rearm`; the first reason stays."""
        self.stopped = self.stopped or reason or "stopped"

    def rearm(self, now: float, there: np.ndarray | None = None) -> None:
        """A person allows motion again; only requests stamped after ``now`` are listened to.

        ``there`` [D] is where the person sees the arm, if that is ``elsewhere``: measurements near it are believed
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
            self._state, self.elsewhere = dataclasses.replace(self._state, measured=seen), ""
            self._overspeed = Overspeed(self.limits)
        self._followed, self._armed = None, now
        self.stopped = f"it is not where it was sent ({self.elsewhere})" if self.elsewhere else ""

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
        self.elsewhere = self._far(measurement.position, [joint.lead for joint in self.limits.joints])
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
        self.elsewhere = self._far(measurement.position, reach)
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


RECOVERY = 0.1  # of the velocity limit: back inside the limits, and to where the arm is held
LONGEST = 2.0  # control periods: a call that comes later finds the arm braking already
SAME = 1e-11  # in a joint's unit: positions that differ by rounding only
REST = 1e-9  # in a joint's unit per second

# Why a command is not what was asked for; "" where it is.
REASONS = (
    "",
    # the request was followed as far as it may be
    "joint limit",
    "workspace",
    "lead",  # over the measured position
    "rate",  # velocity, acceleration or jerk
    # the request was refused, and the one before holds
    "not finite",
    "shape",
    "source",
    "stale",
    "from the future",
    "out of order",
    "before re-arming",
    # the arm is brought to rest and held
    "no request",
    "watchdog",
    "deadman",
    "stopped",
)


@dataclass(frozen=True)
class Request:
    """Where somebody wants the joints: position float [D], stamp in seconds, source "policy" or "human".

    The supervisor copies it: what its owner writes into the array afterwards changes nothing.
    """

    position: np.ndarray
    stamp: float
    source: str


@dataclass(frozen=True)
class Command:
    """What is sent, beside what was asked for.

    position   float64 [D], safe to send
    requested  float64 [D] as it came, also where it was refused (NaN if of another shape); None where nothing came
    clipped    bool [D], where ``position`` is not what was requested
    source     "policy" or "human" while a request is followed, "safety" while coming to rest, "hold" at rest
    reason     one of REASONS
    """

    position: np.ndarray
    requested: np.ndarray | None
    clipped: np.ndarray
    source: str
    reason: str


@dataclass(frozen=True)
class SafetyState:
    """All that :func:`limit` knows.

    motion    commanded position, velocity and acceleration of each joint
    measured  float64 [D], the last good measurement
    asked     the request that is followed; None while there is none
    held      float64 [D], where the arm is held: the position that was measured when it had come to rest; None before
    """

    limits: Limits
    motion: tuple[Motion, ...]
    measured: np.ndarray
    workspace: Workspace | None = None
    asked: Request | None = None
    held: np.ndarray | None = None

    @classmethod
    def at_rest(cls, limits: Limits, measured: np.ndarray, kinematics: Chain | None = None) -> SafetyState:
        """The arm as it is found, wherever that is."""
        names = [joint.name for joint in limits.joints]
        if limits.workspace is not None and kinematics is None:
            raise ContractError(
                "The limits have a workspace and the arm has no kinematics, so nobody knows what is inside; give the "
                "chain of its links, or limits without a workspace."
            )
        workspace = Workspace(limits.workspace, kinematics, names) if kinematics is not None else None
        motion = tuple(Motion(float(position), 0.0, 0.0) for position in measured)
        return cls(limits, motion, np.array(measured, np.float64), workspace)

    @property
    def position(self) -> np.ndarray:
        """The last command [D]."""
        return np.array([motion.position for motion in self.motion])

    @property
    def resting(self) -> bool:
        return all(abs(motion.velocity) < REST and abs(motion.acceleration) < REST for motion in self.motion)


def limit(state: SafetyState, request: Request | None, dt: float) -> tuple[Command, SafetyState]:
    """The command that is sent ``dt`` seconds after the last one, and the state after it.

    ``request`` has [D] finite numbers.  None brings the arm to rest and holds it at the position that is measured
    then, not at the last goal.
    """
    if request is None:
        return _hold(state, dt)
    asked = request.position
    courses, reason = _courses(state, asked, _velocity(state.asked, request), dt, speed=1.0)
    state = dataclasses.replace(state, motion=_advanced(courses, asked, dt), asked=request, held=None)
    position = np.where(abs(state.position - asked) <= SAME, asked, state.position)
    clipped = position != asked
    return Command(position, asked, clipped, request.source, reason if clipped.any() else ""), state


def _velocity(before: Request | None, request: Request) -> np.ndarray:
    """How fast the request moves, by its stamps [D]; 0 for the first one and for one that is followed again."""
    if before is None or request.stamp <= before.stamp:
        return np.zeros(len(request.position))
    with np.errstate(over="ignore"):  # infinite is what it is: the rates bound it
        return np.asarray((request.position - before.position) / (request.stamp - before.stamp), np.float64)


def _hold(state: SafetyState, dt: float) -> tuple[Command, SafetyState]:
    joints, held, resting = state.limits.joints, state.held, state.resting
    if resting and (held is None or (abs(state.measured - held) > [joint.lead for joint in joints]).any()):
        held = state.measured  # come to rest, or pushed away by somebody
    if held is None:
        longest = LONGEST / state.limits.control_hz
        motion = tuple(
            Course(start, 0.0, longest, _rates(joint)).at(dt) for start, joint in zip(state.motion, joints, strict=True)
        )
    else:
        courses, _ = _courses(state, held, np.zeros(len(held)), dt, speed=RECOVERY)
        motion = _advanced(courses, held, dt)
    state = dataclasses.replace(state, motion=motion, asked=None, held=held)
    source = "hold" if resting else "safety"
    return Command(state.position, None, np.zeros(len(joints), bool), source, "no request"), state


def _courses(
    state: SafetyState, asked: np.ndarray, velocity: np.ndarray, dt: float, speed: float
) -> tuple[list[Course], str]:
    """A safe course for each joint, and why they may not be where they are asked to be."""
    courses, reason = [], "rate"
    for joint, start, measured, goal, drift in zip(
        state.limits.joints, state.motion, state.measured, asked, velocity, strict=True
    ):
        outside = not joint.low <= start.position <= joint.high
        rates = _rates(joint, RECOVERY if outside else speed)
        rest = Course(start, 0.0, 0.0, rates).legs()[-1].end.position if outside else start.position
        low, high = _range(joint, float(measured), rest)
        target = min(max(float(goal), low), high)
        follows = target == goal and not outside
        along = min(max(float(drift), -rates.velocity), rates.velocity) if follows else 0.0
        if not joint.low <= goal <= joint.high:
            reason = "joint limit"
        elif target != goal and reason == "rate":
            reason = "lead"
        courses.append(
            steer(JointBounds(rates, low, high), start, target, along, dt, LONGEST / state.limits.control_hz)
        )
    if state.workspace is not None:
        within = state.workspace.within(courses, state.measured)
        reason = reason if within is courses or reason == "joint limit" else "workspace"
        courses = within
    return courses, reason


def _rates(joint: JointLimits, speed: float = 1.0) -> RateBounds:
    return RateBounds(speed * joint.velocity, joint.acceleration, joint.jerk)


def _range(joint: JointLimits, measured: float, rest: float) -> tuple[float, float]:
    """Where the command may be: near the measured position, but within the limits whatever is measured.

    A command that is outside, because the arm was found there, goes no farther out than where it can be at ``rest``:
    on its way back it does not turn.
    """
    lowest, highest = min(joint.low, rest), max(joint.high, rest)
    near, far = measured - joint.lead, measured + joint.lead
    low, high = max(joint.low, near), min(joint.high, far)
    if low <= high:
        return low, high
    edge = min(near, highest) if near > joint.high else max(far, lowest)
    return edge, edge


def _advanced(courses: Sequence[Course], goal: np.ndarray, dt: float) -> tuple[Motion, ...]:
    motions = (course.at(dt) for course in courses)
    return tuple(
        Motion(float(there), 0.0, 0.0)
        if abs(motion.position - there) <= SAME and abs(motion.velocity) < REST and abs(motion.acceleration) < REST
        else motion
        for motion, there in zip(motions, goal, strict=True)
    )


TURN = 0.2  # rad, all joints together, between two positions that are looked at
SLACK = 2.5e-3  # m; TURN² / 8 times 0.5 m, by which a point of an arm of that length may leave the chord between them
TRIES = 5
STILL = 1e-9  # m
STRAY = 0.01  # m; by which the measured arm may be outside: it sags and lags behind


class Workspace:
    """A box, or none, and where ``chain`` puts the points of an arm with the joints ``names``."""

    def __init__(self, box: Box | None, chain: Chain, names: Sequence[str]) -> None:
        self._chain, self._columns = chain, chain.columns(names)
        radii = np.asarray([point.radius for point in chain.points])
        moved = np.asarray([point.link >= 0 for point in chain.points])
        low, high = (np.asarray(box.low), np.asarray(box.high)) if box else (np.full(3, -np.inf), np.full(3, np.inf))
        self._moved, thick = moved, radii[moved, None] + SLACK
        self._low, self._high = low + thick, high - thick
        points = [point.name for point in chain.points]
        self._one = [points.index(one) for one, _ in chain.apart]
        self._other = [points.index(other) for _, other in chain.apart]
        self._apart = radii[self._one] + radii[self._other] + 2 * SLACK

    def outside(self, angles: np.ndarray) -> np.ndarray:
        """By how many metres the worst point is outside or in another, [N] at ``angles`` [N, J]; negative inside."""
        points = self._chain.positions(angles)
        moved = points[:, self._moved]
        worst = np.asarray(np.maximum(self._low - moved, moved - self._high).max((1, 2)))
        if not self._one:
            return worst
        distances = np.linalg.norm(points[:, self._one] - points[:, self._other], axis=-1)
        return np.asarray(np.maximum(worst, (self._apart - distances).max(1)))

    def within(self, courses: list[Course], measured: np.ndarray) -> list[Course]:
        """The courses themselves where they stay in the workspace, else slower ones that do, at worst braking.

        An arm that is outside is not let farther out.  Where the ``measured`` one [D] is outside by more than
        ``STRAY``, courses lead it inward only: it is taken to keep its distance from the command.
        """
        courses_of_chain = [courses[column] for column in self._columns]
        if all(course.goal == 0 and course.start.velocity == 0 for course in courses_of_chain):
            return courses
        commanded = np.array([course.start.position for course in courses_of_chain])
        lag = measured[list(self._columns)] - commanded
        now, there = map(float, self.outside(np.stack([commanded, commanded + lag])))

        def fits(share: float) -> bool:
            path = _path([_slower(course, share) for course in courses_of_chain])
            if there > STRAY and not _inward_only(self.outside(path + lag)):
                return False
            worst = self.outside(path)
            return bool(worst.max() <= max(0.0, now) and worst[-1] <= max(0.0, now - STILL))

        if fits(1.0):
            return courses
        good, bad = 0.0, 1.0
        for _ in range(TRIES):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        chained = set(self._columns)
        return [_slower(course, good) if column in chained else course for column, course in enumerate(courses)]


def _inward_only(worst: np.ndarray) -> bool:
    """Whether a path, of which each position is outside by ``worst`` [N], leads nowhere farther out."""
    return bool((np.diff(np.maximum(worst, STRAY)) <= STILL).all())


def _slower(course: Course, share: float) -> Course:
    return course._replace(goal=share * course.goal)


def _path(courses: list[Course]) -> np.ndarray:
    """Angles [N, J] until all are at rest, no more than TURN apart."""
    end = max(course.lasts() for course in courses)
    speed = sum(course.fastest() for course in courses)
    times = np.linspace(0.0, end, 2 + math.ceil(end * speed / TURN))
    return np.stack([course.positions(times) for course in courses], axis=1)
