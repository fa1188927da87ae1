"""When a canary is taken back, and which robots try it."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.intervals import poisson_rate, wilson
from vla_rl.fleet.releases import CanaryRule, Outcomes, choose_canaries, judge

RULE = CanaryRule(min_episodes=5)


@pytest.mark.parametrize(
    ("canary", "active", "rollback"),
    [
        ((10, 0), (100, 90), True),
        ((100, 70), (100, 90), True),
        ((100, 80), (100, 90), False),  # the intervals overlap: [.71, .87] and [.83, .94]
        ((100, 90), (100, 70), False),  # better
        ((4, 0), (100, 100), False),  # too few
        ((100, 0), (4, 4), False),
        ((5, 0), (8, 8), True),
    ],
)
def test_a_canary_is_taken_back_when_its_interval_lies_below(canary, active, rollback):
    verdict = judge(Outcomes(*canary), Outcomes(*active), RULE)
    assert verdict.rollback is rollback
    if min(canary[0], active[0]) >= 5:
        assert rollback == (wilson(canary[1], canary[0])[1] < wilson(active[1], active[0])[0])
        assert f"{canary[1]}/{canary[0]}" in verdict.why and f"{active[1]}/{active[0]}" in verdict.why


def test_a_rise_of_interventions_or_clips_per_minute_is_an_alarm():
    active = Outcomes(50, 40, 3000.0, 50, 100)
    assert judge(Outcomes(10, 8, 600.0, 10, 20), active, RULE).alarms == ()
    more = judge(Outcomes(10, 8, 600.0, 40, 20), active, RULE)
    assert not more.rollback and len(more.alarms) == 1 and "interventions per minute" in more.alarms[0]
    low, high = (poisson_rate(40, 10)[0], poisson_rate(50, 50)[1])  # in minutes
    assert f"at least {low:.2g} interventions" in more.alarms[0] and f"at most {high:.2g};" in more.alarms[0]
    overlapping = Outcomes(10, 8, 600.0, 16, 20)
    assert poisson_rate(50, 50)[0] < poisson_rate(16, 10)[0] < high < 1.6 < poisson_rate(16, 10)[1]
    assert judge(overlapping, active, RULE).alarms == ()
    assert "clips per minute" in judge(Outcomes(10, 8, 600.0, 10, 90), active, RULE).alarms[0]
    assert judge(Outcomes(10, 8, 60.0, 10, 20), active, RULE).alarms != ()  # the same number in less time


def test_how_often_the_rule_is_right():
    """The docstring's figures, with fewer trials."""
    generator = np.random.default_rng(0)

    def taken_back(active_rate, canary_rate, active_episodes, trials=60):
        count, rule = 0, CanaryRule()
        for _ in range(trials):
            active = Outcomes(active_episodes, int(generator.binomial(active_episodes, active_rate)))
            successes = np.cumsum(generator.random(200) < canary_rate)
            count += any(judge(Outcomes(i + 1, int(s)), active, rule).rollback for i, s in enumerate(successes))
        return count / trials

    assert taken_back(0.9, 0.9, 200) < 0.15
    assert taken_back(0.9, 0.7, 200) > 0.95


def test_some_robots_try_a_version_and_others_the_next():
    robots = [f"arm{i}" for i in range(30)]
    chosen = [choose_canaries(robots, version, 0.1) for version in range(20)]
    assert {len(some) for some in chosen} == {3} and len(set(chosen)) > 15
    assert choose_canaries(reversed(robots), 4, 0.1) == chosen[4]
    assert choose_canaries(["only"], 1, 0.1) == ("only",)


def test_the_share_of_canaries_is_rounded_to_the_nearest_robot():
    assert [len(choose_canaries(map(str, range(count)), 2, 0.1)) for count in (1, 14, 16, 30)] == [1, 1, 2, 3]
