"""Predicted against recorded rewards of calls, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.evaluation.agreement import reward_agreement

RECORDED = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [5.0, np.nan]])
PREDICTED = np.array([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0], [0.0, 9.0]])


def test_rewards_agree_by_correlation_and_error_of_the_replays_that_have_the_call():
    first, second = reward_agreement(PREDICTED, RECORDED, np.array([2, 2, 2, 0]), (1, 2))
    assert (first.horizon, first.replays, second.replays) == (1, 3, 3)
    assert first.correlation == pytest.approx(1.0) and first.error == pytest.approx(1.0)
    assert first.spread == pytest.approx(np.std([0.0, 1.0, 2.0]))
    assert second.correlation is None and second.spread == 0.0
    (all_four,) = reward_agreement(PREDICTED, RECORDED, np.array([2, 2, 2, 2]), (1,))
    assert all_four.correlation == pytest.approx(np.corrcoef(PREDICTED[:, 0], RECORDED[:, 0])[0, 1]) and (
        all_four.correlation < 0
    )


def test_a_constant_and_replays_without_rewards_have_no_correlation():
    (one,) = reward_agreement(np.zeros((4, 2)), RECORDED, np.full(4, 2), (1,))
    assert one.correlation is None and one.replays == 4
    (two,) = reward_agreement(PREDICTED, RECORDED, np.full(4, 2), (2,))
    assert two.replays == 3
    assert reward_agreement(PREDICTED, RECORDED * np.nan, np.full(4, 2), (1,)) == ()
