"""Recorded actions are imagined to their last one, in any company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.world_models.small_models import initial_states, model
from vla_rl.contract.errors import UserError
from world_models.config import ImaginationConfig, Limits
from world_models.env import ImaginedEnv
from world_models.initial_states import OrderedPool
from world_models.replay import ReplayResult, replay

LENGTHS = [7, 3, 6, 5, 1, 8, 4]
CONFIG = ImaginationConfig(batch_size=4, success_threshold=0.5)


def recorded(seed: int = 0) -> list[np.ndarray]:
    chooser = np.random.default_rng(seed)
    return [chooser.uniform([-0.5, -2.0], [0.5, 1.0], (count, 2)).astype(np.float32) for count in LENGTHS]


def test_a_replay_is_the_imagined_rollout_of_its_actions_alone():
    """One by one, each in an environment that ends with it, at the end of every call and after the last action.

    Bit for bit on every processor, because the replay keeps its place in a call of equal shape and only its neighbours
    are others: kernels may round the places of a batch differently.
    """
    made = model()
    first = initial_states(made, count=len(LENGTHS)).first
    found = replay(made, first, recorded(), CONFIG)
    threshold = float(np.nanmedian(found.success))
    for i, actions in enumerate(recorded()):
        alone = ImaginationConfig(len(actions), batch_size=4, success_threshold=2.0, failure_threshold=2.0)
        place = sum(length % 3 == LENGTHS[i] % 3 for length in LENGTHS[:i])  # one call holds replays of equal remainder
        env = ImaginedEnv(made, Only(first, i), place + 1, None, alone)
        env.reset(np.arange(place + 1), np.array([*range(100, 100 + place), i]))
        stops = sorted({*range(3, len(actions) + 1, 3), len(actions)})
        assert found.step[i].tolist() == stops + [0] * (found.step.shape[1] - len(stops))
        successes = []
        for k, (begin, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            chunk = np.zeros((place + 1, stop - begin, 2), np.float32)
            chunk[place] = actions[begin:stop]
            obs = env.step(chunk).obs
            np.testing.assert_array_equal(found.pictures[i, k], np.moveaxis(obs.images["front"][place], -1, 0))
            np.testing.assert_array_equal(found.state[i, k], obs.state[place])
            assert found.uncertainty[i, k] == env.uncertainty[place]
            successes += [stop] if env.outcome[place, 0] >= threshold else []
        assert found.success_step(threshold)[i] == min(successes, default=np.inf)
    assert 0 < np.isfinite(found.success_step(threshold)).sum() < len(LENGTHS)
    assert [np.isfinite(column).sum() for column in found.by_depth()] == [7, 5, 2]
    with pytest.raises(UserError, match="no initial state 7 among 7"):
        OrderedPool(first).draw(np.array([7]), 0.0)


@pytest.mark.full
@pytest.mark.parametrize("every", [1, 2])
def test_a_replay_reports_the_highest_success_that_is_looked_at(every):
    """At every, or every second, of the three control steps of a call, at its end and after the last action."""
    made = model()
    first = initial_states(made, count=len(LENGTHS)).first
    found = replay(made, first, recorded(), replace(CONFIG, outcome_every=every))
    alone = replace(CONFIG, horizon=9, success_threshold=2.0, failure_threshold=2.0, mid_call_steps=0)
    highest = np.zeros(found.success.shape)
    for i, actions in enumerate(recorded()):
        env = ImaginedEnv(made, Only(first, i), 1, None, alone)
        env.reset([0], [i])
        for t, action in enumerate(actions, 1):
            env.step(action[None, None])
            if t % 3 % every == 0 or t == len(actions):
                highest[i, (t - 1) // 3] = max(highest[i, (t - 1) // 3], env.outcome[0, 0])
    # Kernels round the places of a batch differently.
    np.testing.assert_allclose(np.nan_to_num(found.success), highest, rtol=0, atol=2e-4)
    atleast = replay(made, first, recorded(), CONFIG).success
    assert (found.success > atleast + 1e-3).any()


class Only:
    """Always the same initial state."""

    def __init__(self, states, index: int) -> None:
        self.initial_states, self.index = states, index

    def draw(self, seeds, share):
        return self.initial_states.select(np.full(len(seeds), self.index))


def test_after_uncertainty_a_replay_counts_no_success():
    """Three replays with a high success probability at the second and the third call; one ends before the third."""
    step = np.array([[3, 6, 9], [3, 6, 9], [3, 6, 0]])
    success = np.array([[0.1, 0.9, 0.9], [0.1, 0.9, 0.9], [0.1, 0.9, np.nan]], np.float32)
    uncertainty = np.array([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0], [0.0, 0.25, np.nan]], np.float32)
    empty = np.zeros((3, 3, 0))
    found = ReplayResult(step, success, uncertainty, empty, empty, np.zeros((3, 3)))
    assert found.success_step(0.5).tolist() == [6, 6, 6]
    assert found.within(Limits((0.4, 0.2, 0.2))).success_step(0.5).tolist() == [6, np.inf, np.inf]
    assert found.within(Limits((0.5, 0.25, 0.5))).success_step(0.5).tolist() == [6, 6, 6]
