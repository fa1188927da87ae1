"""Uncertainty and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.contract.errors import UserError
from world_models.config import Limits
from world_models.model import revision
from world_models.robot import disagreement


def test_disagreement_is_the_weighed_spread_of_the_modes():
    """Of two entries, 0 and 4 with odds 3 to 1 have the mean 1, 3/4 1^2 + 1/4 3^2 = 3; the other entry agrees."""
    modes = torch.tensor([[[0.0, 7.0], [4.0, 7.0]]])
    found = disagreement(modes, torch.tensor([[[0.75, 0.5], [0.25, 0.5]]]).log())
    torch.testing.assert_close(found, torch.tensor([1.5]).sqrt())
    assert disagreement(modes, torch.tensor([[[0.0, 0.0], [-100.0, -100.0]]])).item() == pytest.approx(0.0, abs=1e-6)


def test_revision_is_the_root_mean_square_change_of_an_estimate():
    """Of eight numbers one by 4 and one by -2: (16 + 4) / 8; nothing where nothing changed."""
    first = torch.zeros(2, 2, 2, 2)
    last = first.clone()
    last[0, 0, 1, 0], last[0, 1, 0, 1] = 4.0, -2.0
    torch.testing.assert_close(revision(first, last), torch.tensor([2.5**0.5, 0.0]))


def test_a_limit_is_the_conformal_quantile():
    """Of 20 uncertainties the 20th for 95 %: rank ceil(21 x 0.95); of 39 the 38th."""
    limits = Limits.calibrate([np.arange(1.0, 21.0), np.arange(39.0, 0.0, -1.0)], 0.95)
    assert limits.values == (20.0, 38.0)
    assert limits.at(np.array([0, 1, 2, 7])).tolist() == [20.0, 38.0, 38.0, 38.0]


def test_with_too_few_uncertainties_there_is_no_limit():
    assert Limits.calibrate([np.arange(18.0)], 0.95).values == (np.inf,)


def test_a_new_uncertainty_exceeds_the_limit_as_rarely_as_the_quantile_says():
    """Averaged over calibrations, at most 1 - q."""
    chooser = np.random.default_rng(0)
    beyond = [chooser.normal() > Limits.calibrate([chooser.normal(size=30)], 0.9).values[0] for _ in range(4000)]
    assert 0.07 < np.mean(beyond) <= 0.1 + 3 * (0.09 / 4000) ** 0.5


@pytest.mark.parametrize("uncertainties", [[], [np.ones(3), np.ones(0)]])
def test_nothing_to_calibrate_on_is_refused(uncertainties):
    with pytest.raises(UserError, match="no uncertainties to calibrate on"):
        Limits.calibrate(uncertainties)


@pytest.mark.parametrize("quantile", [0.0, 1.5])
def test_a_quantile_is_above_0_up_to_1(quantile):
    with pytest.raises(UserError, match="choose one above 0, up to 1"):
        Limits.calibrate([np.ones(3)], quantile)
