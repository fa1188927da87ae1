"""Threshold, uncertainty limit and horizon: the longest trusted one, on replays counted by hand."""

from __future__ import annotations

from dataclasses import replace

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
    early = np.where(np.arange(COUNT) < 30, 5, TRUE)  # thirty of the successes come by the fifth step

    def in_time(threshold: float, quantile: float) -> np.ndarray:
        return np.where(np.arange(COUNT) < 30, 5, success_steps(threshold, quantile))

    found = UNLIMITED.choose(in_time, early, LENGTH, [5, 10])
    assert (found.table.horizon, found.table.tp, found.table.fp) == (5, 30, 0)


def never(threshold: float, quantile: float) -> np.ndarray:
    return np.full(COUNT, NEVER)


def test_imagined_rollouts_that_never_succeed_are_not_trusted_while_true_successes_exist():
    """They hallucinate nothing at the longest horizon; a shorter one, by which they succeed, is chosen before it."""
    true = np.where(np.arange(COUNT) < 30, 5, TRUE)

    def strict_is_blind(threshold: float, quantile: float) -> np.ndarray:
        return (
            never(threshold, quantile) if threshold == 0.9 else np.where(np.arange(COUNT) < 60, true.clip(5, 10), NEVER)
        )

    config = TrustConfig(max_hallucinated=0.10, thresholds=(0.9, 0.5), quantiles=(1.0,))
    found = config.choose(strict_is_blind, true, LENGTH, [5, 10])
    assert (found.threshold, found.table.horizon, found.table.tp) == (0.5, 5, 30)
    with pytest.raises(UserError, match=r"misses too many .*at best 40 of 40 by step 10.* 100.0 %.*trust.max_missed"):
        UNLIMITED.choose(never, TRUE, LENGTH, [10])
    assert UNLIMITED.choose(never, np.full(COUNT, NEVER), LENGTH, [10]).table.horizon == 10, "nothing is missed"


@pytest.mark.parametrize(("seen", "trusted"), [(40, True), (9, True), (8, False), (1, False)])
def test_imagined_rollouts_that_hardly_ever_succeed_are_not_trusted(seen, trusted):
    """Of forty true successes; the upper bounds are 8.8, 87.7, 89.5 and 99.6 %."""

    def rare(threshold: float, quantile: float) -> np.ndarray:
        return np.where(np.arange(COUNT) < seen, 10, NEVER)

    config = replace(UNLIMITED, max_missed=0.89)
    if trusted:
        assert config.choose(rare, TRUE, LENGTH, [10]).table.tp == seen
    else:
        with pytest.raises(UserError, match=f"at best {40 - seen} of 40"):
            config.choose(rare, TRUE, LENGTH, [10])
    assert replace(UNLIMITED, max_missed=1.0).choose(rare, TRUE, LENGTH, [10]).table.horizon == 10


@pytest.mark.parametrize(
    ("imagined", "true", "enough"), [(11, 506, True), (10, 506, False), (0, 0, True), (0, 6, True)]
)
def test_a_policy_that_hardly_succeeds_in_its_own_imagined_rollouts_learns_nothing_there(imagined, true, enough):
    """Of 128 and 830: the upper bounds are 14.7 and 13.8 %, a quarter of the lower one is 14.4 %; of 6 it is 0.1 %."""
    config = TrustConfig(min_imagined=0.25)
    if enough:
        config.require_closed_loop((imagined, 128), (true, 830))
    else:
        with pytest.raises(UserError, match="in 10 of 128 imagined rollouts and in 506 of 830 real ones"):
            config.require_closed_loop((imagined, 128), (true, 830))
    replace(config, min_imagined=0.0).require_closed_loop((0, 128), (true, 830))


def test_a_horizon_by_which_nothing_succeeds_is_not_trusted():
    """Nobody succeeds by the fifth step, and at the tenth too much is hallucinated: RL would get no reward."""
    with pytest.raises(UserError, match=r"misses too many true ones \(at best 0 of 0 by step 5"):
        UNLIMITED.choose(success_steps, TRUE, LENGTH, [5, 10])
    assert replace(UNLIMITED, max_missed=1.0).choose(success_steps, TRUE, LENGTH, [5, 10]).table.horizon == 5


def test_an_untrusted_world_model_is_refused_with_its_bounds():
    with pytest.raises(UserError, match="no horizon keeps hallucinated successes within 10 %"):
        UNLIMITED.choose(success_steps, TRUE, LENGTH, [10])
    with pytest.raises(UserError, match="no threshold or quantile is given"):
        TrustConfig(thresholds=()).choose(success_steps, TRUE, LENGTH, [10])
