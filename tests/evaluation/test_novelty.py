"""Decisions that leave what was tried, by hand and with another episode's as the measure."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.ranking import Tried


def test_distances_are_in_standard_deviations_to_the_nearest_of_another_episode():
    """Two lines of fifty decisions, two standard deviations apart: neighbours on the same line do not count."""
    along, episode = np.repeat(np.arange(50.0), 2), np.tile([0, 1], 50)
    state = np.stack([along, 10.0 * episode], 1)
    found = Tried.of(state, np.zeros((100, 1, 1)), episode)
    unit = 3**0.5  # relative to the root of three entries
    assert found.limit == pytest.approx(2 / unit)
    step = along.std()
    asked = np.array([[10.2, 0], [49 + 1.9 * step, 10], [49 + 2.1 * step, 10], [25, -9.9], [25, -10.1]])
    assert found.left(asked, np.zeros((5, 1, 1))).tolist() == [False, False, True, False, True]


def test_an_action_that_nobody_took_there_leaves_it():
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, (600, 3))
    chunk = np.repeat(state[:, None, :2], 5, 1) + rng.normal(0, 0.05, (600, 5, 2))
    episode = np.arange(600) // 20
    found = Tried.of(state, chunk, episode)
    assert found.left(state[:100], chunk[:100]).mean() == 0, "what was recorded is at distance 0"
    new = rng.uniform(-0.9, 0.9, (200, 3))
    alike = np.repeat(new[:, None, :2], 5, 1) + rng.normal(0, 0.05, (200, 5, 2))
    assert found.left(new, alike).mean() < 0.1
    assert found.left(new, -alike + 3).mean() == 1
    assert found.left(new[:0], alike[:0]).shape == (0,)


def test_one_episode_is_no_measure():
    with pytest.raises(UserError, match="fewer than two episodes"):
        Tried.of(np.zeros((5, 1)), np.zeros((5, 1, 1)), np.zeros(5, int))
