"""Where success is decided is found by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.contract.errors import UserError
from world_models.config import Limits
from world_models.initial_states import KeyframeConfig, mine
from world_models.model import revision
from world_models.robot import disagreement

CONFIG = KeyframeConfig(jump=0.5, slope=0.3, lead=2, tail=2)
REACH = np.array([0.2, 2.0])


def episodes() -> dict[str, object]:
    """Ten moments each: a success that closes its gripper at step 6, and a failure that goes astray after step 3."""
    action = np.zeros((20, 2))
    action[:, 1] = 1.0
    action[6:9, 1] = -1.0
    value = np.concatenate([np.linspace(0.1, 1.0, 10), [0.1, 0.2, 0.3, 0.4, 0.4, 0.35, 0.3, 0.2, 0.1, 0.0]])
    success = np.zeros(20, bool)
    success[9] = True
    return {"action": action, "reach": REACH, "value": value, "success": success, "spans": [(0, 10), (10, 20)]}


def test_a_rollout_begins_before_a_gripper_closes_not_in_a_drift():
    assert mine(**episodes(), config=CONFIG)["events"].tolist() == [4]
    drift = np.linspace(0, 0.09, 20)[:, None] * np.array([1.0, 0.0])
    assert not mine(**episodes() | {"action": drift}, config=CONFIG)["events"].size


def test_a_failure_diverges_after_its_last_moment_like_a_success():
    """Its values are those of the success up to step 3; an imagined rollout begins two steps before step 4."""
    assert mine(**episodes(), config=CONFIG)["divergence"].tolist() == [12]


def test_without_falling_behind_or_success_nothing_diverges():
    given = episodes()
    given["value"] = np.concatenate([np.linspace(0.1, 1.0, 10), np.linspace(0.2, 1.1, 10)])
    assert not mine(**given, config=CONFIG)["divergence"].size
    given["success"] = np.zeros(20, bool)
    assert not mine(**given, config=CONFIG)["divergence"].size


def test_a_fast_change_of_value_is_found_but_at_no_episodes_end():
    given = episodes()
    given["value"] = np.repeat([0.0, 0.5, 0.5, 0.0], [5, 5, 9, 1])
    assert mine(**given, config=CONFIG)["slope"].tolist() == [3, 4, 17]
    given["value"] = np.repeat([0.0, 0.5, 0.0], [5, 5, 10])
    found = mine(**given, config=CONFIG)
    assert found["events"].tolist() == [4] and found["slope"].tolist() == [3, 4]
    given["value"] = np.repeat([0.0, 0.5, 0.0], [8, 2, 10])
    assert mine(**given, config=KeyframeConfig(jump=9.0, slope=0.3, lead=1, tail=2))["slope"].tolist() == [7]
    assert not mine(**given, config=KeyframeConfig(jump=9.0, slope=0.3, lead=1, tail=3))["slope"].size


def test_a_value_that_is_not_finite_is_named():
    given = episodes()
    given["value"][7] = np.nan
    with pytest.raises(UserError, match="moment 7 is not finite"):
        mine(**given, config=CONFIG)


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
    assert Limits.calibrate([np.arange(18.0)], 0.95).values == (np.inf,)  # too few for any limit
    for given, quantile, what in (([np.ones(3), np.ones(0)], 0.9, "no uncertainties"), ([np.ones(3)], 0.0, "above 0")):
        with pytest.raises(UserError, match=what):
            Limits.calibrate(given, quantile)


def test_new_uncertainties_exceed_the_limit_as_rarely_as_said():
    """Averaged over calibrations, at most 1 - q."""
    chooser = np.random.default_rng(0)
    beyond = [chooser.normal() > Limits.calibrate([chooser.normal(size=30)], 0.9).values[0] for _ in range(4000)]
    assert 0.07 < np.mean(beyond) <= 0.1 + 3 * (0.09 / 4000) ** 0.5
