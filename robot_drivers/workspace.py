"""The workspace: the points of the arm stay in a box and off each other, also while it brakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from robot_drivers.kinematics import Chain
from robot_drivers.limits import Box
from robot_drivers.motion import Course

TURN = 0.2  # rad, all joints together, between two positions that are looked at
SLACK = 2.5e-3  # m; TURN² / 8 times 0.5 m, by which a point of an arm of that length may leave the chord between them
TRIES = 5
SAME = 1e-9  # m
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
            return bool(worst.max() <= max(0.0, now) and worst[-1] <= max(0.0, now - SAME))

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
    return bool((np.diff(np.maximum(worst, STRAY)) <= SAME).all())


def _slower(course: Course, share: float) -> Course:
    return course._replace(goal=share * course.goal)


def _path(courses: list[Course]) -> np.ndarray:
    """Angles [N, J] until all are at rest, no more than TURN apart."""
    end = max(course.lasts() for course in courses)
    speed = sum(course.fastest() for course in courses)
    times = np.linspace(0.0, end, 2 + math.ceil(end * speed / TURN))
    return np.stack([course.positions(times) for course in courses], axis=1)
