"""Threshold and horizon: the longest dream that hallucinates little, on replays counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import NEVER, Trust

COUNT = 100
LENGTH = np.full(COUNT, 10)
TRUE = np.where(np.arange(COUNT) < 40, 10, NEVER)  # forty successes, all with the last step


def dreams(threshold: float, quantile: float = 1.0) -> np.ndarray:
    """At 0.5 twenty failures are taken for successes; at 0.9 none is, but twenty successes are missed."""
    said = (np.arange(COUNT) < 60) if threshold < 0.9 else (np.arange(COUNT) < 20)
    return np.where(said, 10, NEVER)


def test_a_strict_threshold_saves_the_long_horizon():
    found = Trust(most=0.10, thresholds=(0.5, 0.9)).choose(dreams, TRUE, LENGTH, [5, 10])
    assert (found.threshold, found.table.horizon) == (0.9, 10)
    assert (found.table.fp, found.table.fn) == (0, 20)


def test_of_thresholds_that_are_trusted_as_far_the_more_accurate_one_is_taken():
    found = Trust(most=0.5, thresholds=(0.9, 0.5, 0.6)).choose(dreams, TRUE, LENGTH, [10])
    assert found.threshold == 0.9  # both are right in eighty; the first of equals stays
    worse = Trust(most=0.5, thresholds=(0.5, 0.9)).choose(
        lambda threshold, quantile: dreams(threshold) if threshold < 0.9 else np.full(COUNT, NEVER), TRUE, LENGTH, [10]
    )
    assert worse.threshold == 0.5  # eighty right against sixty


def test_limits_of_doubt_save_the_long_horizon():
    """All twenty that are hallucinated, and five of the others, have doubts beyond the 0.9 quantile."""

    def doubting(threshold: float, quantile: float) -> np.ndarray:
        said = np.arange(COUNT) < 60 if quantile > 0.9 else (np.arange(COUNT) >= 5) & (np.arange(COUNT) < 40)
        return np.where(said, 10, NEVER)

    found = Trust(most=0.10, thresholds=(0.5,), quantiles=(1.0, 0.9, 0.8)).choose(doubting, TRUE, LENGTH, [5, 10])
    assert (found.quantile, found.table.horizon, found.table.fp, found.table.fn) == (0.9, 10, 0, 5)


def test_without_a_strict_threshold_dreams_are_shorter():
    found = Trust(most=0.10, thresholds=(0.5,), quantiles=(1.0,)).choose(dreams, TRUE, LENGTH, [5, 10])
    assert found.table.horizon == 5  # nothing was dreamt or true by then


def test_dreams_that_cannot_be_trusted_are_refused_with_their_bounds():
    with pytest.raises(UserError, match="no horizon keeps hallucinated successes within 10 %"):
        Trust(most=0.10, thresholds=(0.5,), quantiles=(1.0,)).choose(dreams, TRUE, LENGTH, [10])
    with pytest.raises(UserError, match="no threshold was given"):
        Trust(thresholds=()).choose(dreams, TRUE, LENGTH, [10])
