"""The number of episodes that a difference takes: simulated evaluations find it as often as was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.stats import episodes_needed, independent_discordance, mcnemar_exact, mcnemar_power


@pytest.mark.parametrize(
    ("n", "difference", "discordant"),
    [(60, 0.2, 0.4), (200, 0.1, 0.3), (157, 0.05, 0.05), (400, 0.05, 0.5), (9, 0.5, 1)],
)
def test_the_power_is_that_of_simulated_evaluations(n, difference, discordant):
    """McNemar's test of 20,000 evaluations with known probabilities: 4 standard deviations."""
    chances = [(discordant + difference) / 2, (discordant - difference) / 2, 1 - discordant]
    counts = np.random.default_rng(0).multinomial(n, chances, size=20_000)
    p_values = {pair: mcnemar_exact(*pair) for pair in {(int(b), int(c)) for b, c, _ in counts}}
    rejected = np.mean([p_values[int(b), int(c)] <= 0.05 for b, c, _ in counts])
    assert mcnemar_power(n, difference, discordant) == pytest.approx(rejected, abs=4 * 0.5 / np.sqrt(20_000))


def test_without_a_difference_the_test_errs_at_most_as_often_as_its_level():
    assert 0.01 < mcnemar_power(300, 0.0, 0.4) <= 0.05


@pytest.mark.parametrize(
    ("difference", "discordant"), [(0.05, 0.5), (0.1, 0.42), (0.05, 0.05), (0.02, 0.2), (0.3, 0.4)]
)
def test_one_episode_less_has_less_power(difference, discordant):
    n = episodes_needed(difference, discordant)
    assert mcnemar_power(n, difference, discordant) >= 0.8 > mcnemar_power(n - 1, difference, discordant)
    assert episodes_needed(-difference, discordant) == n


def test_it_takes_as_many_as_the_normal_approximation_says():
    """Connor 1987: (z_a sqrt(d) + z_b sqrt(d - delta^2))^2 / delta^2; the exact test takes a few more."""
    for difference, discordant in ((0.05, 0.5), (0.02, 0.2)):
        spread = 1.959964 * np.sqrt(discordant) + 0.841621 * np.sqrt(discordant - difference**2)
        approximate = (spread / difference) ** 2
        assert approximate < episodes_needed(difference, discordant) < 1.03 * approximate + 10


def test_more_power_and_less_agreement_take_more_episodes():
    assert episodes_needed(0.05, 0.1) < episodes_needed(0.05, 0.3) < episodes_needed(0.05, 0.3, power=0.9)


def test_independent_policies_disagree_most_in_the_middle():
    assert independent_discordance(0.5, 0.0) == 0.5
    assert independent_discordance(0.9, 0.05) == pytest.approx(0.9 * 0.05 + 0.1 * 0.95)


@pytest.mark.parametrize(("difference", "discordant"), [(0.0, 0.5), (0.3, 0.2), (0.5, 1.5)])
def test_a_difference_that_cannot_be_is_refused(difference, discordant):
    with pytest.raises(UserError, match="does not exist"):
        episodes_needed(difference, discordant)


def test_a_difference_that_takes_more_than_anybody_plays_is_refused():
    with pytest.raises(UserError, match="takes more episodes than anybody plays; ask for one of at least"):
        episodes_needed(0.004, 0.5)
