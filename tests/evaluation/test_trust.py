"""Threshold, uncertainty limit and horizon: the longest trusted one, on replays counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import NEVER, TrustConfig

COUNT = 100
LENGTH = np.full(COUNT, 10)
UNLIMITED = TrustConfig(max_hallucinated=0.10, thresholds=(0.5,), quantiles=(1.0,))
TRUE = np.where(np.arange(COUNT) < 40, 10, NEVER)  # forty successes, all with the last step


def success_steps(threshold: float, quantile: float = 1.0) -> np.ndarray:
    """At 0.5 twenty failures are hallucinated successes; at 0.9 none, but twenty successes are missed."""
    said = (np.arange(COUNT) < 60) if threshold < 0.9 else (np.arange(COUNT) < 20)
    return np.where(said, 10, NEVER)


def test_a_strict_threshold_allows_the_long_horizon():
    found = TrustConfig(max_hallucinated=0.10, thresholds=(0.5, 0.9)).choose(success_steps, TRUE, LENGTH, [5, 10])
    assert (found.threshold, found.table.horizon) == (0.9, 10)
    assert (found.table.fp, found.table.fn) == (0, 20)


def test_of_thresholds_with_equal_horizons_the_most_accurate_is_chosen():
    found = TrustConfig(max_hallucinated=0.5, thresholds=(0.9, 0.5, 0.6)).choose(success_steps, TRUE, LENGTH, [10])
    assert found.threshold == 0.9  # both are correct in eighty; the first of equals is chosen

    def blind_at_the_strict(threshold: float, quantile: float) -> np.ndarray:
        return success_steps(threshold) if threshold < 0.9 else np.full(COUNT, NEVER)

    config = TrustConfig(max_hallucinated=0.5, thresholds=(0.5, 0.9))
    worse = config.choose(blind_at_the_strict, TRUE, LENGTH, [10])
    assert worse.threshold == 0.5  # eighty correct against sixty


def test_uncertainty_limits_allow_the_long_horizon():
    """All twenty hallucinated ones, and five others, have an uncertainty beyond the 0.9 quantile."""

    def truncated(threshold: float, quantile: float) -> np.ndarray:
        said = np.arange(COUNT) < 60 if quantile > 0.9 else (np.arange(COUNT) >= 5) & (np.arange(COUNT) < 40)
        return np.where(said, 10, NEVER)

    config = TrustConfig(max_hallucinated=0.10, thresholds=(0.5,), quantiles=(1.0, 0.9, 0.8))
    found = config.choose(truncated, TRUE, LENGTH, [5, 10])
    assert (found.quantile, found.table.horizon, found.table.fp, found.table.fn) == (0.9, 10, 0, 5)


def test_without_a_strict_threshold_the_horizon_is_shorter():
    found = UNLIMITED.choose(success_steps, TRUE, LENGTH, [5, 10])
    assert found.table.horizon == 5  # neither has a success by then


def test_an_untrusted_world_model_is_refused_with_its_bounds():
    with pytest.raises(UserError, match="no horizon keeps hallucinated successes within 10 %"):
        UNLIMITED.choose(success_steps, TRUE, LENGTH, [10])
    with pytest.raises(UserError, match="no threshold is given"):
        TrustConfig(thresholds=()).choose(success_steps, TRUE, LENGTH, [10])
