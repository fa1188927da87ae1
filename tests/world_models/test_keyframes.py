"""Where success is decided is found by itself."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from world_models.initial_states import KeyframeConfig, mine

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


def test_a_gripper_that_closes_is_an_event_and_the_imagined_rollout_begins_before_it():
    assert mine(**episodes(), config=CONFIG).events.tolist() == [4]


def test_a_slow_drift_of_an_action_is_none():
    given = episodes()
    given["action"] = np.linspace(0, 0.09, 20)[:, None] * np.array([1.0, 0.0])
    assert not mine(**given, config=CONFIG).events.size


def test_a_failure_diverges_after_its_last_moment_like_a_success():
    """Its values are those of the success up to step 3; an imagined rollout begins two steps before step 4."""
    assert mine(**episodes(), config=CONFIG).divergence.tolist() == [12]


def test_a_failure_that_never_fell_behind_and_no_success_at_all_give_no_divergence():
    given = episodes()
    given["value"] = np.concatenate([np.linspace(0.1, 1.0, 10), np.linspace(0.2, 1.1, 10)])
    assert not mine(**given, config=CONFIG).divergence.size
    given["success"] = np.zeros(20, bool)
    assert not mine(**given, config=CONFIG).divergence.size


def test_a_value_that_changes_fast_is_found_and_never_at_an_episodes_end():
    given = episodes()
    given["value"] = np.repeat([0.0, 0.5, 0.5, 0.0], [5, 5, 9, 1])
    assert mine(**given, config=CONFIG).slope.tolist() == [3, 4, 17]
    given["value"] = np.repeat([0.0, 0.5, 0.0], [5, 5, 10])
    given["spans"] = [(0, 10), (10, 20)]
    assert mine(**given, config=CONFIG).slope.tolist() == [3, 4]


def test_a_keyframe_is_never_at_the_end_of_an_episode():
    given = episodes()
    given["value"] = np.repeat([0.0, 0.5, 0.0], [8, 2, 10])
    assert mine(**given, config=KeyframeConfig(jump=9.0, slope=0.3, lead=1, tail=2)).slope.tolist() == [7]
    assert not mine(**given, config=KeyframeConfig(jump=9.0, slope=0.3, lead=1, tail=3)).slope.size


def test_all_has_every_moment_once():
    given = episodes()
    given["value"] = np.repeat([0.0, 0.5, 0.0], [6, 4, 10])
    found = mine(**given, config=CONFIG)
    assert found.events.tolist() == [4] and found.slope.tolist() == [4, 5]
    assert found.all.tolist() == sorted({*found.events, *found.slope, *found.divergence})


def test_a_value_that_is_not_finite_is_named():
    given = episodes()
    given["value"][7] = np.nan
    with pytest.raises(UserError, match="moment 7 is not finite"):
        mine(**given, config=CONFIG)
