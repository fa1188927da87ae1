"""Real episodes are bought when imagination drifts from reality, from a fixed budget, with reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.training.coevolve import Coevolution, CoevolutionConfig, Signals

CALM = Signals(imagined=0.6, real=0.55, uncertain=0.1, inverse_dynamics_error=0.2)
CONFIG = CoevolutionConfig(budget=250, batch=100, success_gap=0.1, uncertainty_rise=0.05, inverse_dynamics_ratio=1.5)


def test_nothing_is_bought_while_all_signals_are_calm():
    decision = Coevolution(CONFIG, CALM).decide(CALM)
    assert decision.buy == 0 and decision.reasons == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"imagined": 0.66}, "imagined success 66% exceeds real success 55%"),
        ({"real": 0.4}, "imagined success 60% exceeds real success 40%"),
        ({"uncertain": 0.16}, "uncertainty truncates 16% of the rollouts, at first 10%"),
        ({"inverse_dynamics_error": 0.31}, "inverse-dynamics error 0.310, at first 0.200"),
    ],
)
def test_each_sign_alone_buys_and_says_why(change, reason):
    decision = Coevolution(CONFIG, CALM).decide(replace(CALM, **change))
    assert decision.buy == 100 and decision.reasons == (reason,)


def test_a_lower_imagined_success_buys_nothing():
    assert Coevolution(CONFIG, CALM).decide(Signals(0.1, 0.9, 0.0, 0.0)).buy == 0


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
