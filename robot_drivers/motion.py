"""How one joint changes its velocity within limits, and where it comes to rest: piecewise constant jerk.

A joint at (position, velocity, acceleration) reaches a velocity u and acceleration 0 soonest by at most three phases:
jerk +J or -J up to a peak acceleration, a while at it where it is the limit, and the opposite jerk back to 0.  With u
= 0 that is braking.  Two facts make it a safety filter:

- Braking goes on along the same path from wherever it has led to: a path that was found to be safe once stays safe.
- A larger u leads to a position, velocity and acceleration that are nowhere smaller, now and while braking
  afterwards. So the safe u are an interval, and it can be searched by bisection.

(L. Berscheid and T. Kröger, "Jerk-limited Real-time Trajectory Generation with Arbitrary Target States", RSS 2021,
solve the harder problem of the shortest time to a whole state.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SLOWER = 16  # halvings of a velocity that is too fast
TURNS = 80  # of the search for a velocity: no more than that
EXACT = 1e-13  # in the joint's unit: less than a step of float64 for positions of a few radians
Phases = tuple[tuple[float, float], ...]  # (duration, jerk)


class RateBounds(NamedTuple):
    """Bounds of velocity, acceleration and jerk."""

    velocity: float
    acceleration: float
    jerk: float


class Motion(NamedTuple):
    """A joint's commanded position, velocity and acceleration at one time."""

    position: float
    velocity: float
    acceleration: float

    def after(self, time: float, jerk: float) -> Motion:
        position, velocity, acceleration = self
        return Motion(
            position + time * (velocity + time * (acceleration / 2 + time * jerk / 6)),
            velocity + time * (acceleration + time * jerk / 2),
            acceleration + time * jerk,
        )


def to_velocity(motion: Motion, goal: float, rates: RateBounds) -> Phases:
    """The phases after which ``motion`` has velocity ``goal`` and acceleration 0.

    With |a| <= A and |v + a|a| / 2J| <= V before, both hold all along: the second is the velocity that is reached
    when the acceleration is taken back at once, and it moves monotonically towards ``goal``.
    """
    _, velocity, acceleration = motion
    jerk = rates.jerk
    settled = velocity + acceleration * abs(acceleration) / (2 * jerk)
    sign = 1.0 if settled <= goal else -1.0
    gain, already = sign * (goal - velocity), sign * acceleration
    least = max(already, 0.0) ** 2
    peak = min(math.sqrt(max(jerk * gain + already * already / 2, least)), rates.acceleration)
    # With p the peak: gain = (p² - a²) / 2J + p t + p² / 2J
    hold = max(gain - (2 * peak * peak - already * already) / (2 * jerk), 0.0) / peak if peak > 0 else 0.0
    return (max(peak - already, 0.0) / jerk, sign * jerk), (hold, 0.0), (peak / jerk, -sign * jerk)


def run(motion: Motion, phases: Phases, goal: float, time: float) -> Motion:
    """The motion after ``time`` seconds of ``phases``, and of constant velocity ``goal`` once they are over."""
    for duration, jerk in phases:
        if time <= duration:
            return motion.after(time, jerk)
        motion, time = motion.after(duration, jerk), time - duration
    return Motion(motion.position + goal * time, goal, 0.0)


class Leg(NamedTuple):
    """A while at one jerk."""

    start: Motion
    time: float
    jerk: float

    @property
    def end(self) -> Motion:
        return self.start.after(self.time, self.jerk)

    def extent(self) -> tuple[float, float]:
        """The lowest and the highest position, both ends included."""
        turns = (0.0, *_turns(self.start, self.jerk, self.time), self.time)
        positions = [self.start.after(turn, self.jerk).position for turn in turns]
        return min(positions), max(positions)


def legs(motion: Motion, phases: Phases, goal: float, time: float) -> list[Leg]:
    """What :func:`run` goes through."""
    gone = []
    for duration, jerk in phases:
        gone.append(Leg(motion, min(duration, time), jerk))
        motion, time = gone[-1].end, time - gone[-1].time
    return [*gone, Leg(Motion(motion.position, goal, 0.0), time, 0.0)] if time > 0 else gone


def _turns(motion: Motion, jerk: float, span: float) -> list[float]:
    """The times within ``span`` at which the velocity is 0: there the position is extreme."""
    _, velocity, acceleration = motion
    if jerk == 0:
        times = [-velocity / acceleration] if acceleration else []
    else:
        square = acceleration * acceleration - 2 * jerk * velocity
        roots = math.sqrt(square) if square >= 0 else math.nan
        times = [(-acceleration - roots) / jerk, (-acceleration + roots) / jerk]
    return [time for time in times if 0 < time < span]


class JointBounds(NamedTuple):
    """What :func:`steer` may do with one joint: its rates, and the positions between which it stays."""

    rates: RateBounds
    low: float
    high: float


class Course(NamedTuple):
    """A joint goes to the velocity ``goal`` for ``span`` seconds, then brakes, from ``start``."""

    start: Motion
    goal: float
    span: float
    rates: RateBounds

    def at(self, time: float) -> Motion:
        """The motion at ``time`` seconds from the start."""
        going = run(self.start, to_velocity(self.start, self.goal, self.rates), self.goal, min(time, self.span))
        if time <= self.span:
            return going
        return run(going, to_velocity(going, 0.0, self.rates), 0.0, time - self.span)

    def legs(self) -> list[Leg]:
        going = legs(self.start, to_velocity(self.start, self.goal, self.rates), self.goal, self.span)
        slowing = to_velocity(going[-1].end, 0.0, self.rates)
        return going + legs(going[-1].end, slowing, 0.0, sum(duration for duration, _ in slowing))

    def extent(self) -> tuple[float, float]:
        """The lowest and the highest position until it is at rest."""
        extents = [leg.extent() for leg in self.legs()]
        return min(low for low, _ in extents), max(high for _, high in extents)

    def positions(self, times: np.ndarray) -> np.ndarray:
        """The positions [N] at ``times`` [N] from the start."""
        passed = self.legs()
        begins = np.cumsum([0.0] + [leg.time for leg in passed[:-1]])
        which = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
        position, velocity, acceleration = np.array([leg.start for leg in passed]).T[:, which]
        time = np.minimum(times - begins[which], np.array([leg.time for leg in passed])[which])
        jerk = np.array([leg.jerk for leg in passed])[which]
        return np.asarray(position + time * (velocity + time * (acceleration / 2 + time * jerk / 6)))

    def lasts(self) -> float:
        """Seconds until it is at rest."""
        return sum(leg.time for leg in self.legs())

    def fastest(self) -> float:
        """A bound of its speed on the way."""
        _, velocity, acceleration = self.start
        turned = velocity + acceleration * abs(acceleration) / (2 * self.rates.jerk)
        return max(abs(velocity), abs(turned), abs(self.goal))

    def settled(self) -> bool:
        """Whether it has reached the velocity ``goal`` when the span is over."""
        return sum(duration for duration, _ in to_velocity(self.start, self.goal, self.rates)) <= self.span

    def beside(self, drift: float) -> float:
        """Where it is, as seen from something that moves at ``drift`` from the span's end on, once both move alike."""
        going = self.at(self.span)
        phases = to_velocity(going, drift, self.rates)
        time = sum(duration for duration, _ in phases)
        return run(going, phases, drift, time).position - drift * time


def steer(joint: JointBounds, motion: Motion, target: float, drift: float, dt: float, longest: float) -> Course:
    """The course towards ``target``, which moves at the velocity ``drift``, that is safe whatever happens.

    It is at ``target`` after ``dt`` where that takes no haste, else on the way of coming to rest beside it.  Safe: it
    stays within ``low`` and ``high``, also if nobody steers again; where braking leaves them, it makes nothing
    worse.  A
    ``dt`` above ``longest`` goes on for ``longest`` only, then brakes.
    """
    rates, span = joint.rates, min(dt, longest)
    brake = Course(motion, 0.0, span, rates)
    if motion == (target, 0.0, 0.0) and drift == 0:
        return brake
    lowest, highest = brake.extent()
    low, high = min(joint.low, lowest), max(joint.high, highest)

    def course(goal: float) -> Course:
        return brake._replace(goal=goal)

    def safe(goal: float) -> bool:
        below, above = course(goal).extent()
        return low <= below and above <= high

    exact = _solve(lambda goal: course(goal).at(dt).position - target, rates.velocity)
    if (
        exact is not None
        and abs(exact - drift) <= rates.acceleration * dt / 2
        and course(exact).settled()
        and safe(exact)
    ):
        return course(exact)
    goal = _solve(lambda goal: course(goal).beside(drift) - target, rates.velocity)
    if goal is None:
        goal = math.copysign(rates.velocity, target - brake.beside(drift))
    if safe(goal):
        return course(goal)
    good = 0.0
    for _ in range(SLOWER):
        middle = (good + goal) / 2
        good, goal = (middle, goal) if safe(middle) else (good, middle)
    return course(good)


def _solve(function: Callable[[float], float], bound: float) -> float | None:
    """The root within ``bound`` of 0 of a function that increases, or None where there is none.

    Secants and halvings take turns: the functions are flat in places and steep in others.
    """
    low, high = -bound, bound
    below, above = function(low), function(high)
    if below > 0 or above < 0:
        return None
    for turn in range(TURNS):
        if high - low <= EXACT * bound or above == below:
            break
        middle = low - below * (high - low) / (above - below) if turn % 2 == 0 else (low + high) / 2
        value = function(middle)
        if abs(value) <= EXACT:
            return middle
        low, below, high, above = (middle, value, high, above) if value < 0 else (low, below, middle, value)
    return low if -below < above else high


def ramp(start: np.ndarray, goal: np.ndarray, velocity: np.ndarray, control_dt: float) -> np.ndarray:
    """Positions [H,D], one for each control step of ``control_dt`` seconds, on the straight line in joint space.

    All joints ([D] each) arrive together, in the last of H >= 1 steps, which is ``goal``, and none is faster than its
    ``velocity`` per second.
    """
    share = float(np.max(np.abs(goal - start) / velocity)) / control_dt  # control steps of the joint that takes longest
    steps = max(1, math.ceil(share - 1e-9))
    way: np.ndarray = start + np.arange(1, steps + 1)[:, None] / steps * (goal - start)
    way[-1] = goal
    return way
