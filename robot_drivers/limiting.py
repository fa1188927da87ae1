"""The command that comes next, whatever is asked for: the pure part of the supervisor (``safety.py``).

The commands are samples of one smooth function of time for each joint, whose position, velocity, acceleration and
jerk are within the limits, and which comes to rest within them if nobody asks for anything any more (``motion.py``).
So it does not matter when, or how irregularly, they are made.  They stay near the *measured* position: an arm that
lags or is blocked holds its command back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robot_drivers.kinematics import Chain
from robot_drivers.limits import Box, JointLimits, Limits
from robot_drivers.motion import Course, Joint, Motion, Rates, steer
from vla_rl.contract.errors import ContractError

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
        """Whether the command has come to rest."""
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
        courses.append(steer(Joint(rates, low, high), start, target, along, dt, LONGEST / state.limits.control_hz))
    if state.workspace is not None:
        within = state.workspace.within(courses, state.measured)
        reason = reason if within is courses or reason == "joint limit" else "workspace"
        courses = within
    return courses, reason


def _rates(joint: JointLimits, speed: float = 1.0) -> Rates:
    return Rates(speed * joint.velocity, joint.acceleration, joint.jerk)


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
