"""Real episodes are bought when imagination drifts from reality, from a fixed budget, with reasons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.training.world_model import Coevolution, CoevolutionConfig, Signals

CALM = Signals(
    imagined=0.6, real=0.55, uncertain=0.1, inverse_dynamics_error=0.2, rollouts=10_000, real_episodes=10_000
)
CONFIG = CoevolutionConfig(budget=250, batch=100, success_gap=0.1, uncertainty_rise=0.05, inverse_dynamics_ratio=1.5)


def test_nothing_is_bought_while_all_signals_are_calm():
    decision = Coevolution(CONFIG, CALM).decide(CALM)
    assert decision.buy == 0 and decision.reasons == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"imagined": 0.68}, "imagined success 68% exceeds real success 55%"),
        ({"real": 0.4}, "imagined success 60% exceeds real success 40%"),
        ({"uncertain": 0.17}, "uncertainty truncates 17% of the rollouts, at first 10%"),
        ({"inverse_dynamics_error": 0.31}, "inverse-dynamics error 0.310, at first 0.200"),
    ],
)
def test_each_sign_alone_buys_and_says_why(change, reason):
    decision = Coevolution(CONFIG, CALM).decide(replace(CALM, **change))
    assert decision.buy == 100 and decision.reasons == (reason,)


def test_a_lower_imagined_success_buys_nothing():
    assert Coevolution(CONFIG, CALM).decide(Signals(0.1, 0.9, 0.0, 0.0, 100, 100)).buy == 0


@pytest.mark.parametrize(("imagined", "rollouts", "bought"), [(0.66, 10_000, 0), (0.72, 128, 0), (0.90, 128, 100)])
def test_a_difference_that_chance_explains_buys_nothing(imagined, rollouts, bought):
    """The gap of ten points is exceeded each time; an interval of the difference lies above it in the last alone."""
    assert Coevolution(CONFIG, CALM).decide(replace(CALM, imagined=imagined, rollouts=rollouts)).buy == bought


@pytest.mark.parametrize(("rate", "real_episodes"), [(0.02, 830), (0.5, 50), (0.95, 830)])
def test_equal_rates_buy_in_at_most_two_of_a_hundred_decisions(rate, real_episodes):
    """Success and uncertainty by chance, 128 rollouts a decision, the default config; forty points are seen."""
    rng, config, decisions = np.random.default_rng(1), CoevolutionConfig(budget=100), 3000

    def signals(real: float) -> Signals:
        imagined, uncertain = rng.binomial(128, rate, 2) / 128
        played = rng.binomial(real_episodes, real) / real_episodes
        return Signals(float(imagined), float(played), float(uncertain), 0.2, 128, real_episodes)

    bought = [Coevolution(config, signals(rate)).decide(signals(rate)).buy for _ in range(decisions)]
    assert np.mean(np.array(bought) > 0) <= 0.02
    if rate >= 0.5:
        noticed = [Coevolution(config, signals(rate)).decide(signals(rate - 0.4)).buy for _ in range(300)]
        assert np.mean(np.array(noticed) > 0) >= 0.9


def test_one_false_alarm_does_not_spend_the_budget():
    config = CoevolutionConfig(budget=100)
    first = Coevolution(config, CALM).decide(replace(CALM, uncertain=0.5)).buy
    assert 0 < first <= config.budget / 2


def test_a_policy_that_was_never_played_alone_is_not_compared_with_reality():
    unknown = replace(CALM, real=None, real_episodes=0)
    assert Coevolution(CONFIG, unknown).decide(replace(unknown, imagined=1.0)).reasons == ()
    assert Coevolution(CONFIG, unknown).decide(replace(unknown, uncertain=0.5)).buy == 100


def test_the_budget_is_never_exceeded_and_reasons_stay():
    state, worse, bought = Coevolution(CONFIG, CALM), replace(CALM, uncertain=0.5), []
    for _ in range(5):
        decision = state.decide(worse)
        bought.append(decision.buy)
        assert decision.reasons
        state = state.renewed(CALM, decision.buy)
    assert bought == [100, 100, 50, 0, 0] and state.spent == 250


def test_bought_episodes_set_the_new_baseline():
    worse = replace(CALM, uncertain=0.5, inverse_dynamics_error=0.4)
    state = Coevolution(CONFIG, CALM).renewed(replace(worse, real=0.6), 100)
    assert state.decide(worse).reasons == ()


def test_numbers_that_buy_nothing_sensible_are_refused():
    for numbers in ({"budget": -1}, {"batch": 0}, {"every": 0}):
        with pytest.raises(UserError, match="cannot be spent"):
            CoevolutionConfig(**numbers)
    with pytest.raises(UserError, match="lets chance buy"):
        CoevolutionConfig(z=0.0)
