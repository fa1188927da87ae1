"""Reality is bought when dreams drift from it, from a fixed budget, with reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.training.coevolve import Coevolution, CoevolutionConfig, Signals

CALM = Signals(imagined=0.6, real=0.55, doubt=0.1, slip=0.2)
CONFIG = CoevolutionConfig(budget=250, batch=100, gap=0.1, doubt=0.05, slip=1.5)


def test_nothing_is_bought_while_dreams_hold():
    decision = Coevolution(CONFIG, CALM).decide(CALM)
    assert decision.buy == 0 and decision.reasons == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"imagined": 0.66}, "imagined success 66% outruns real success 55%"),
        ({"real": 0.4}, "imagined success 60% outruns real success 40%"),
        ({"doubt": 0.16}, "doubt ends 16% of the dreams, at first 10%"),
        ({"slip": 0.31}, "inverse-dynamics residual 0.310, at first 0.200"),
    ],
)
def test_each_sign_alone_buys_and_says_why(change, reason):
    decision = Coevolution(CONFIG, CALM).decide(replace(CALM, **change))
    assert decision.buy == 100 and decision.reasons == (reason,)


def test_dreams_may_be_worse_than_reality_for_nothing():
    assert Coevolution(CONFIG, CALM).decide(Signals(0.1, 0.9, 0.0, 0.0)).buy == 0


def test_the_budget_is_never_exceeded_and_reasons_stay():
    state, worse, bought = Coevolution(CONFIG, CALM), replace(CALM, doubt=0.5), []
    for _ in range(5):
        decision = state.decide(worse)
        bought.append(decision.buy)
        assert decision.reasons
        state = state.renewed(CALM, decision.buy)
    assert bought == [100, 100, 50, 0, 0] and state.spent == 250


def test_what_was_bought_sets_what_is_usual():
    worse = replace(CALM, doubt=0.5, slip=0.4)
    state = Coevolution(CONFIG, CALM).renewed(replace(worse, real=0.6), 100)
    assert state.decide(worse).reasons == ()


def test_numbers_that_buy_nothing_sensible_are_refused():
    for numbers in ({"budget": -1}, {"batch": 0}, {"every": 0}):
        with pytest.raises(UserError, match="cannot be spent"):
            CoevolutionConfig(**numbers)
