"""The threshold has the required precision, is the lowest that does, and never separates equal scores."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.rewards.reward_model import Counts, choose_threshold, value_order_correlation


def test_by_hand():
    score = np.array([3.0, 2.0, 1.0, 0.0, -1.0])
    label = np.array([True, True, False, True, False])
    assert choose_threshold(score, label, 1.0) == 1.5  # 2 of 2
    assert choose_threshold(score, label, 0.75) == -0.5  # 3 of 4, though 2 of 3 at a higher threshold is too few
    assert choose_threshold(score, label, 0.6) == -1.5  # all 5: half a unit below the last
    assert Counts.from_decisions(score >= 1.5, label) == Counts(true_positives=2, predicted=2, actual=3, total=5)


def test_equal_scores_are_never_separated():
    score, label = np.array([2.0, 1.0, 1.0, 1.0, 0.0]), np.array([True, True, False, False, False])
    assert choose_threshold(score, label, 0.9) == 1.5
    assert choose_threshold(score, label, 0.5) == 0.5
    with pytest.raises(UserError, match="no threshold"):
        choose_threshold(np.zeros(4), np.array([True, False, False, False]), 0.5)


def test_it_is_the_lowest_one_with_the_precision_on_500_cases():
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        count = int(rng.integers(1, 25))
        score = rng.integers(-4, 5, count) / 2
        label = rng.random(count) < 1 / (1 + np.exp(-2 * score))
        wanted = float(rng.choice([0.5, 0.8, 0.95, 1.0]))
        # Every decision that a threshold can make, from the strictest to the laxest.
        decisions = [score >= value for value in sorted(set(score.tolist()), reverse=True)]
        keep = [said for said in decisions if label[said].any() and label[said].mean() >= wanted]
        if not keep:
            refused += 1
            with pytest.raises(UserError, match="no threshold"):
                choose_threshold(score, label, wanted)
        else:
            assert (score >= choose_threshold(score, label, wanted)).tolist() == keep[-1].tolist()
    assert 20 < refused < 400


def test_a_refusal_names_the_best_precision():
    with pytest.raises(UserError, match=r"precision of 90% \(at best 67% on 4 labelled frames\)"):
        choose_threshold(np.array([4.0, 3.0, 2.0, 1.0]), np.array([False, True, True, False]), 0.9)


@pytest.mark.parametrize(
    ("value", "correlation"),
    [
        ([0.1, 0.2, 0.7, 0.9], 1.0),
        ([5, 3, 2, 1], -1.0),
        ([0.3, 0.3, 0.3], 0.0),
        ([1, 3, 2, 4], 0.8),  # 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15)
        ([0, 0, 1], 3**0.5 / 2),  # ranks 1.5, 1.5, 3
        ([2], 0.0),
    ],
)
def test_value_order_correlation_by_hand(value, correlation):
    assert value_order_correlation(np.array(value, np.float32)) == pytest.approx(correlation)
