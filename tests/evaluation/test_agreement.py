"""World model against simulator: counts by hand and by brute force, golden statistics, what is trusted, rewards."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation.agreement import (
    NEVER,
    ReplayAgreement,
    TrustConfig,
    cohen_kappa,
    kendall_tau_b,
    policy_agreement,
    replay_agreement,
    reward_agreement,
)
from vla_rl.evaluation.stats import Rate

TRUE, IMAGINED = (0.0, 0.2, 0.4, 0.6), (0.2, 0.4, 0.4, 0.6)


def counts(table: ReplayAgreement) -> tuple[int, int, int, int]:
    return table.tp, table.fp, table.fn, table.tn


def test_golden_table():
    """reference/algorithms.md 6; McNemar's p by hand: 2 (1 + 26 + 325 + 2600 + 14950 + 65780) / 2^26."""
    table = ReplayAgreement.of(40, tp=15, fp=5, fn=21, tn=55)
    assert table.accuracy == Rate(70 / 96, *wilson(70, 96), 96)
    assert table.precision == Rate(15 / 20, *wilson(15, 20), 20)
    assert table.missed == Rate(21 / 36, *wilson(21, 36), 36)
    assert table.hallucinated is not None and table.hallucinated.episodes == 60
    assert (table.hallucinated.success, table.hallucinated.low) == pytest.approx((0.0833, 0.0311), abs=5e-5)
    assert table.hallucinated.high == table.hallucinated_high == pytest.approx(0.1912, abs=5e-5)
    assert table.kappa == pytest.approx(0.3659, abs=5e-5)
    assert table.mcnemar_p == pytest.approx(2 * 83682 / 2**26, rel=1e-12)


def test_kappa_is_its_definition():
    cells = np.random.default_rng(0).integers(0, 5, (300, 4)).tolist()
    tried = 0
    for tp, fp, fn, tn in cells:
        n = max(tp + fp + fn + tn, 1)
        chance = Fraction((tp + fp) * (tp + fn) + (fn + tn) * (fp + tn), n * n)
        if n > 1 and chance < 1:
            tried += 1
            expected = (Fraction(tp + tn, n) - chance) / (1 - chance)
            assert cohen_kappa(tp, fp, fn, tn) == pytest.approx(float(expected), abs=1e-12)
    assert tried > 250


@pytest.mark.parametrize(
    ("cells", "kappa"),
    [((0, 0, 0, 9), 0), ((9, 0, 0, 0), 0), ((0, 9, 0, 0), 0), ((5, 4, 0, 0), 0), ((3, 0, 0, 6), 1), ((0, 4, 4, 0), -1)],
)
def test_kappa_with_a_single_answer(cells, kappa):
    assert cohen_kappa(*cells) == kappa


def test_rates_over_no_replay_are_none():
    never = ReplayAgreement.of(5, 0, 0, 0, 7)
    assert (never.precision, never.missed, never.accuracy.success, never.mcnemar_p) == (None, None, 1.0, 1.0)
    always = ReplayAgreement.of(5, 7, 0, 0, 0)
    assert always.hallucinated is None and always.hallucinated_high == 1.0


def test_replays_by_hand():
    """Imagined successes: late, early, exact, missed, rightly none; the last replay ends before its outcome."""
    imagined = [6, 3, 5, NEVER, NEVER, NEVER]
    true = [4, 7, 5, 2, NEVER, NEVER]
    early, middle, late = replay_agreement(imagined, true, [8, 8, 8, 2, 8, 4], [3, 5, 8])
    assert counts(early) == (0, 1, 1, 4)
    assert counts(middle) == (1, 1, 2, 1), "the last replay ends before 5, so its true outcome is unknown"
    assert counts(late) == (3, 0, 1, 1), "a success at 2 is a success by 8, although its actions ended"
    assert (early.horizon, middle.horizon, late.horizon) == (3, 5, 8)


def random_replays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    length = generator.integers(1, 13, 40)
    first = [np.where(generator.random(40) < 0.4, NEVER, generator.integers(1, length + 1)) for _ in range(2)]
    return first[0], first[1], length


@pytest.mark.parametrize("seed", range(5))
def test_replays_equal_a_count_of_single_flags(seed):
    imagined, true, length = random_replays(seed)
    horizons = list(range(1, int(length.max()) + 1))
    for horizon, table in zip(horizons, replay_agreement(imagined, true, length, horizons), strict=True):
        cells = {pair: 0 for pair in ((True, True), (True, False), (False, True), (False, False))}  # tp, fp, fn, tn
        for imagined_step, true_step, steps in zip(imagined, true, length, strict=True):
            played = [step for step in range(1, horizon + 1) if step <= steps]
            was = any(step == true_step for step in played)
            if was or len(played) == horizon:
                cells[any(step == imagined_step for step in played), was] += 1
        assert counts(table) == tuple(cells.values())


def test_the_world_model_does_not_decide_which_replays_are_used():
    imagined, true, length = random_replays(0)
    for other in (imagined, np.full(40, NEVER), np.ones(40), true):
        for table, same in zip(*(replay_agreement(x, true, length, [4, 9]) for x in (imagined, other)), strict=True):
            assert (table.tp + table.fn, table.fp + table.tn) == (same.tp + same.fn, same.fp + same.tn)


@pytest.mark.parametrize(
    ("imagined", "true", "length", "horizons", "match"),
    [
        ([1.0], [0.0], [3], [2], "first successes 'true'"),
        ([math.nan], [1.0], [3], [2], "first successes 'imagined'"),
        ([1.0, 2.0], [1.0], [3], [2], "first successes 'imagined'"),
        ([1.0], [1.0], [3], [4], r"horizon 4 is outside 1\.\.3"),
        ([1.0], [1.0], [3.0], [1], "lengths of replays, float64"),
    ],
)
def test_impossible_replays_are_refused(imagined, true, length, horizons, match):
    with pytest.raises(ContractError, match=match):
        replay_agreement(imagined, true, np.array(length), horizons)


def test_policies_by_hand():
    """dx = -.3 -.1 .1 .3, dy = -.2 0 0 .2; five of six pairs are concordant, one is tied in the world model."""
    found = policy_agreement(IMAGINED, TRUE)
    r = 0.12 / math.sqrt(0.2 * 0.08)
    assert found.policies == 4 and found.r == pytest.approx(r)
    half = 1.959964  # / sqrt(4 - 3)
    assert (found.r_low, found.r_high) == pytest.approx(
        (math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
    )
    assert (found.r_low, found.r_high) == pytest.approx((-0.1406, 0.9990), abs=1e-4)
    assert found.tau == pytest.approx(5 / math.sqrt(6 * 5))
    assert found.mmrv == pytest.approx(0.2 / 4), "the tie counts against the truly better policy, by the true gap"
    assert (found.slope, found.intercept, found.optimism) == pytest.approx((0.6, 0.22, 0.1))
    assert found.leverage == pytest.approx(r - math.sqrt(0.75)), "without the first or the last r is sqrt(3)/2"


def kendall_by_pairs(x, y):
    concordant = discordant = tied_x = tied_y = 0
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    for i, j in pairs:
        tied_x += x[i] == x[j]
        tied_y += y[i] == y[j]
        product = (x[i] - x[j]) * (y[i] - y[j])
        concordant += product > 0
        discordant += product < 0
    return (concordant - discordant) / math.sqrt((len(pairs) - tied_x) * (len(pairs) - tied_y))


@pytest.mark.parametrize("seed", range(5))
def test_policies_equal_numpy_and_brute_force(seed):
    generator = np.random.default_rng(seed)
    true = generator.integers(0, 9, 12) / 8  # ties among 12 policies
    estimates = np.clip(np.round(8 * (0.5 * true + 0.6 * generator.random(12))) / 8, 0, 1)
    found = policy_agreement(estimates, true)
    assert found.r == pytest.approx(np.corrcoef(estimates, true)[0, 1], abs=1e-12)
    assert (found.slope, found.intercept) == pytest.approx(tuple(np.polyfit(true, estimates, 1)), abs=1e-9)
    assert found.tau == pytest.approx(kendall_by_pairs(estimates, true), abs=1e-12)
    others = [[i for i in range(12) if i != u] for u in range(12)]
    changes = [abs(found.r - np.corrcoef(estimates[rest], true[rest])[0, 1]) for rest in others]
    assert found.leverage == pytest.approx(max(changes), abs=1e-12)
    assert found.optimism == pytest.approx(sum(estimates - true) / 12)


def test_kendall_of_a_published_example():
    """scipy.stats.kendalltau's documentation: -0.4714."""
    x, y = np.array([12.0, 2, 1, 12, 2]), np.array([1.0, 4, 7, 1, 0])
    assert kendall_tau_b(x, y) == pytest.approx(-0.47140452079103173, abs=1e-12)
    assert kendall_tau_b(x, np.ones(5)) == kendall_tau_b(np.ones(5), x) == 0


def test_rates_exactly_on_a_line():
    up, down = policy_agreement(TRUE, TRUE), policy_agreement(TRUE[::-1], TRUE)
    assert (up.r, up.r_low, up.r_high, up.tau, up.mmrv, up.leverage) == (1, -1, 1, 1, 0, 0)
    assert (up.slope, up.intercept, up.optimism) == pytest.approx((1, 0, 0))
    assert (down.r, down.r_low, down.r_high, down.tau) == (-1, -1, 1, -1)
    assert (down.slope, down.intercept) == pytest.approx((-1, 0.6))
    rounded = policy_agreement(0.1 + 0.7 * np.array(TRUE), TRUE)
    assert 1 - 1e-12 < rounded.r <= 1 and (rounded.r_low, rounded.r_high) == (-1, 1), "a point would be certain"


@pytest.mark.parametrize("k", range(4, 13))
def test_a_world_model_of_one_rate_ranks_nothing(k):
    """0.1 is not a binary fraction, so the mean of some of these is not their value."""
    found = policy_agreement(np.full(k, 0.1), np.linspace(0, 1, k))
    assert (found.r, found.r_low, found.r_high, found.tau, found.slope, found.leverage) == (0, -1, 1, 0, 0, 0)
    assert (found.intercept, found.optimism) == pytest.approx((0.1, -0.4))


# -- threshold, uncertainty limit and horizon --------------------------------------------------------------------------

COUNT = 100

LENGTH = np.full(COUNT, 10)

UNLIMITED = TrustConfig(max_hallucinated=0.10, thresholds=(0.5,), quantiles=(1.0,))

LATE = np.where(np.arange(COUNT) < 40, 10, NEVER)  # forty successes, all with the last step


def success_steps(threshold: float, quantile: float = 1.0) -> np.ndarray:
    """At 0.5 twenty failures are hallucinated successes; at 0.9 none, but twenty successes are missed."""
    said = (np.arange(COUNT) < 60) if threshold < 0.9 else (np.arange(COUNT) < 20)
    return np.where(said, 10, NEVER)


def test_a_strict_threshold_allows_the_long_horizon():
    found = TrustConfig(max_hallucinated=0.10, thresholds=(0.5, 0.9)).choose(success_steps, LATE, LENGTH, [5, 10])
    assert (found.threshold, found.table.horizon) == (0.9, 10)
    assert (found.table.fp, found.table.fn) == (0, 20)


def test_uncertainty_limits_allow_the_long_horizon():
    """All twenty hallucinated ones, and five others, have an uncertainty beyond the 0.9 quantile."""

    def truncated(threshold: float, quantile: float) -> np.ndarray:
        said = np.arange(COUNT) < 60 if quantile > 0.9 else (np.arange(COUNT) >= 5) & (np.arange(COUNT) < 40)
        return np.where(said, 10, NEVER)

    config = TrustConfig(max_hallucinated=0.10, thresholds=(0.5,), quantiles=(1.0, 0.9, 0.8))
    found = config.choose(truncated, LATE, LENGTH, [5, 10])
    assert (found.quantile, found.table.horizon, found.table.fp, found.table.fn) == (0.9, 10, 0, 5)


def test_without_a_strict_threshold_the_horizon_is_shorter():
    early = np.where(np.arange(COUNT) < 30, 5, LATE)  # thirty of the successes come by the fifth step

    def in_time(threshold: float, quantile: float) -> np.ndarray:
        return np.where(np.arange(COUNT) < 30, 5, success_steps(threshold, quantile))

    found = UNLIMITED.choose(in_time, early, LENGTH, [5, 10])
    assert (found.table.horizon, found.table.tp, found.table.fp) == (5, 30, 0)


def never(threshold: float, quantile: float) -> np.ndarray:
    return np.full(COUNT, NEVER)


def test_dreams_without_success_are_not_trusted():
    """They hallucinate nothing at the longest horizon; a shorter one, by which they succeed, is chosen before it."""
    true = np.where(np.arange(COUNT) < 30, 5, LATE)

    def strict_is_blind(threshold: float, quantile: float) -> np.ndarray:
        return (
            never(threshold, quantile) if threshold == 0.9 else np.where(np.arange(COUNT) < 60, true.clip(5, 10), NEVER)
        )

    config = TrustConfig(max_hallucinated=0.10, thresholds=(0.9, 0.5), quantiles=(1.0,))
    found = config.choose(strict_is_blind, true, LENGTH, [5, 10])
    assert (found.threshold, found.table.horizon, found.table.tp) == (0.5, 5, 30)
    with pytest.raises(UserError, match=r"misses too many .*at best 40 of 40 by step 10.* 100.0 %.*trust.max_missed"):
        UNLIMITED.choose(never, LATE, LENGTH, [10])
    assert UNLIMITED.choose(never, np.full(COUNT, NEVER), LENGTH, [10]).table.horizon == 10, "nothing is missed"


@pytest.mark.parametrize(("seen", "trusted"), [(40, True), (9, True), (8, False), (1, False)])
def test_dreams_that_hardly_ever_succeed_are_not_trusted(seen, trusted):
    """Of forty true successes; the upper bounds are 8.8, 87.7, 89.5 and 99.6 %."""

    def rare(threshold: float, quantile: float) -> np.ndarray:
        return np.where(np.arange(COUNT) < seen, 10, NEVER)

    config = replace(UNLIMITED, max_missed=0.89)
    if trusted:
        assert config.choose(rare, LATE, LENGTH, [10]).table.tp == seen
    else:
        with pytest.raises(UserError, match=f"at best {40 - seen} of 40"):
            config.choose(rare, LATE, LENGTH, [10])
    assert replace(UNLIMITED, max_missed=1.0).choose(rare, LATE, LENGTH, [10]).table.horizon == 10


@pytest.mark.parametrize(
    ("imagined", "true", "enough"), [(11, 506, True), (10, 506, False), (0, 0, True), (0, 6, True)]
)
def test_a_policy_that_fails_in_its_own_dreams_is_refused(imagined, true, enough):
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
        UNLIMITED.choose(success_steps, LATE, LENGTH, [5, 10])
    assert replace(UNLIMITED, max_missed=1.0).choose(success_steps, LATE, LENGTH, [5, 10]).table.horizon == 5


def test_a_horizon_is_trusted_by_its_upper_bound():
    """45 failures without a hallucination are the smallest number whose upper bound is within 10 %."""
    few, enough = (np.full(count, NEVER) for count in (44, 45))
    assert UNLIMITED.choose(lambda *given: enough, enough, np.full(45, 10), [10]).table.tn == 45
    with pytest.raises(
        UserError, match=r"no horizon keeps .* within 10 % \(.*: 10\.0 % at 10\).*45 failures are enough"
    ):
        UNLIMITED.choose(lambda *given: few, few, np.full(44, 10), [10])


def test_without_anything_to_choose_from_nothing_is_trusted():
    with pytest.raises(UserError, match="no threshold or quantile is given"):
        TrustConfig(thresholds=()).choose(success_steps, LATE, LENGTH, [10])


# -- rewards -----------------------------------------------------------------------------------------------------------

RECORDED = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [5.0, np.nan]])

PREDICTED = np.array([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0], [0.0, 9.0]])


def test_rewards_agree_by_correlation_and_error():
    first, second = reward_agreement(PREDICTED, RECORDED, np.array([2, 2, 2, 0]), (1, 2))
    assert (first.horizon, first.replays, second.replays) == (1, 3, 3)
    assert first.correlation == pytest.approx(1.0) and first.error == pytest.approx(1.0)
    assert first.spread == pytest.approx(np.std([0.0, 1.0, 2.0]))
    assert second.correlation is None and second.spread == 0.0
    (all_four,) = reward_agreement(PREDICTED, RECORDED, np.array([2, 2, 2, 2]), (1,))
    assert all_four.correlation == pytest.approx(np.corrcoef(PREDICTED[:, 0], RECORDED[:, 0])[0, 1]) and (
        all_four.correlation < 0
    )


def test_what_is_constant_or_missing_has_no_correlation():
    (one,) = reward_agreement(np.zeros((4, 2)), RECORDED, np.full(4, 2), (1,))
    assert one.correlation is None and one.replays == 4
    (two,) = reward_agreement(PREDICTED, RECORDED, np.full(4, 2), (2,))
    assert two.replays == 3
    assert reward_agreement(PREDICTED, RECORDED * np.nan, np.full(4, 2), (1,)) == ()
