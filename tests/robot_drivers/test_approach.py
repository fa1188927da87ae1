"""A slow way: straight, no faster than it may be, and at its end exactly where it should be."""

from __future__ import annotations

import numpy as np
import pytest

from robot_drivers.motion import approach


def test_the_slowest_joint_sets_the_time_and_all_arrive_together():
    way = approach(np.array([0.0, 1.0]), np.array([0.4, 0.9]), np.array([1.0, 0.5]), 0.1)
    np.testing.assert_allclose(way, [[0.1, 0.975], [0.2, 0.95], [0.3, 0.925], [0.4, 0.9]], atol=1e-12)


def test_a_way_that_is_not_a_whole_number_of_steps_is_slower_and_never_faster():
    start, goal, velocity = np.array([0.0]), np.array([0.25]), np.array([1.0])
    way = approach(start, goal, velocity, 0.1)
    assert len(way) == 3 and np.diff(way[:, 0], prepend=0.0).max() <= 0.1
    assert way[-1, 0] == 0.25


@pytest.mark.parametrize("goal", [0.3, 0.3 + 1e-12])
def test_an_arm_that_is_there_already_gets_one_step(goal: float):
    way = approach(np.array([0.3]), np.array([goal]), np.array([1.0]), 0.02)
    assert way.tolist() == [[goal]]
