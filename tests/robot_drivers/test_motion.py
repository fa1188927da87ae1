"""Jerk-limited motions of one joint, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from robot_drivers.motion import Course, JointBounds, Motion, RateBounds, ramp, run, steer, to_velocity
from tests.robot_drivers.checking import holds_for

RATES = RateBounds(2.0, 10.0, 200.0)


@st.composite
def motions(draw):
    """Motions from which braking stays within the rates."""
    acceleration = draw(st.floats(-10, 10))
    room = 2.0 - acceleration**2 / 400
    velocity = draw(st.floats(-room, room)) - (acceleration * abs(acceleration) / 400) * draw(st.floats(0, 1))
    return Motion(draw(st.floats(-1, 1)), max(min(velocity, 2.0), -2.0), acceleration)


@st.composite
def courses(draw):
    return Course(draw(motions()), draw(st.floats(-2, 2)), draw(st.floats(0, 0.1)), RATES)


@holds_for(motions(), st.floats(-2, 2), gate=21, full=60)
def test_a_velocity_is_reached_at_rest_and_within_the_rates(motion, goal):
    phases = to_velocity(motion, goal, RATES)
    end = motion
    for duration, jerk in phases:
        assert duration >= 0 and abs(jerk) <= 200.0
        end = end.after(duration, jerk)
        assert abs(end.acceleration) <= 10.0 + 1e-9
    assert end.velocity == pytest.approx(goal, abs=1e-9) and end.acceleration == pytest.approx(0, abs=1e-6)


@holds_for(courses(), gate=21, full=60)
def test_the_extent_of_a_course_is_that_of_its_positions(course):
    times = np.linspace(0, course.lasts() + 0.1, 2000)
    positions = course.positions(times)
    np.testing.assert_allclose(positions, [course.at(time).position for time in times.tolist()], atol=1e-12)
    np.testing.assert_allclose(course.extent(), (positions.min(), positions.max()), atol=1e-5)
    speeds = abs(np.diff(positions)) / np.diff(times)
    assert speeds.max() <= course.fastest() + 1e-9


@holds_for(courses(), st.floats(-2, 2), gate=21, full=60)
def test_a_larger_goal_is_nowhere_behind(course, goal):
    low, high = (course._replace(goal=value) for value in sorted((course.goal, goal)))
    times = np.linspace(0, 1.5, 200)
    assert (low.positions(times) <= high.positions(times) + 1e-9).all()


@holds_for(motions(), st.floats(0, 0.5), st.floats(0, 0.5), gate=21, full=60)
def test_braking_goes_on_along_the_same_path(motion, first, second):
    at_once = run(motion, to_velocity(motion, 0.0, RATES), 0.0, first + second)
    between = run(motion, to_velocity(motion, 0.0, RATES), 0.0, first)
    again = run(between, to_velocity(between, 0.0, RATES), 0.0, second)
    np.testing.assert_allclose(again, at_once, atol=1e-6)


def test_a_moving_target_is_followed_beside_it_without_overshoot():
    joint, motion, target = JointBounds(RATES, -9.0, 9.0), Motion(0.0, 0.0, 0.0), 0.5
    for _ in range(100):
        target += 0.02 * 0.8
        motion = steer(joint, motion, target, 0.8, 0.02, 0.04).at(0.02)
        assert motion.position <= target + 1e-9
    assert motion == pytest.approx((target, 0.8, 0.0), abs=1e-6)


def test_the_slowest_joint_sets_the_time_and_all_arrive_together():
    way = ramp(np.array([0.0, 1.0]), np.array([0.4, 0.9]), np.array([1.0, 0.5]), 0.1)
    np.testing.assert_allclose(way, [[0.1, 0.975], [0.2, 0.95], [0.3, 0.925], [0.4, 0.9]], atol=1e-12)


def test_a_way_of_a_fraction_of_steps_is_slower_not_faster():
    start, goal, velocity = np.array([0.0]), np.array([0.25]), np.array([1.0])
    way = ramp(start, goal, velocity, 0.1)
    assert len(way) == 3 and np.diff(way[:, 0], prepend=0.0).max() <= 0.1
    assert way[-1, 0] == 0.25


@pytest.mark.parametrize("goal", [0.3, 0.3 + 1e-12])
def test_an_arm_that_is_there_already_gets_one_step(goal: float):
    way = ramp(np.array([0.3]), np.array([goal]), np.array([1.0]), 0.02)
    assert way.tolist() == [[goal]]
