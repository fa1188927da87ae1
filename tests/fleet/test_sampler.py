"""SOP's task-balanced adaptive sampler: its weights by hand, its draws, and its state."""

from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest

from vla_rl.fleet.sampler import CORRECTIONS, OFFLINE, ONLINE, AdaptiveSampler, SamplerConfig, sigmoid

BOTH = np.array([[100, 0, 100]])  # one task with autonomous and recorded data


def sampler_with(online: float, offline: float, a: float = 1.0, **options: object) -> AdaptiveSampler:
    """A sampler that has seen these losses of task 0."""
    sampler = AdaptiveSampler(SamplerConfig(a=a, **options))  # type: ignore[arg-type]
    sampler.record(np.array([[0, ONLINE], [0, OFFLINE]]), np.array([online, offline]))
    return sampler


def test_equal_losses_share_equally() -> None:
    weights = sampler_with(0.7, 0.7).weights(BOTH)
    np.testing.assert_allclose(weights, [[0.5, 0.0, 0.5]], rtol=0, atol=1e-15)


def test_the_weight_by_hand() -> None:
    # exp(2 * .6) / (exp(2 * .6) + exp(.9)) = 3.3201169 / (3.3201169 + 2.4596031)
    weights = sampler_with(0.6, 0.9, a=2.0).weights(BOTH)
    np.testing.assert_allclose(weights[0, ONLINE], 0.574442517, rtol=0, atol=1e-9)
    np.testing.assert_allclose(weights[0, OFFLINE], 1 - 0.574442517, rtol=0, atol=1e-9)


def test_it_grows_with_the_online_loss_within_its_bounds() -> None:
    losses = [0.0, 0.5, 1.0, 1.5, 2.0]
    found = [sampler_with(loss, 1.0).weights(BOTH)[0, ONLINE] for loss in losses]
    assert all(a < b for a, b in itertools.pairwise(found))
    assert sampler_with(50.0, 0.0).weights(BOTH)[0, ONLINE] == 0.8
    assert sampler_with(0.0, 50.0).weights(BOTH)[0, ONLINE] == 0.2


def test_losses_of_any_size_overflow_nothing() -> None:
    with np.errstate(all="raise"):
        assert sampler_with(1e6, 0.0).weights(BOTH)[0, ONLINE] == 0.8
        assert sampler_with(0.0, 1e6).weights(BOTH)[0, ONLINE] == 0.2
    assert sigmoid(-1e9) == 0.0 and sigmoid(1e9) == 1.0


def test_tasks_are_uniform_whatever_they_have() -> None:
    counts = np.array([[1, 0, 5], [10_000, 0, 3], [0, 0, 0], [0, 0, 2]])
    np.testing.assert_allclose(AdaptiveSampler().weights(counts).sum(1), [1 / 3, 1 / 3, 0.0, 1 / 3], atol=1e-15)


def test_a_task_without_data_of_robots_draws_what_was_recorded_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sampler, counts = AdaptiveSampler(), np.array([[0, 0, 4], [3, 0, 4]])
    with caplog.at_level(logging.WARNING, "vla_rl.fleet"):
        weights = sampler.weights(counts)
        sampler.weights(counts)
    np.testing.assert_array_equal(weights, [[0.0, 0.0, 0.5], [0.25, 0.0, 0.25]])
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["task 0 has no data of robots yet"]


def test_corrections_have_their_share_of_what_robots_did_but_at_least_the_floor() -> None:
    sampler = sampler_with(0.7, 0.7, min_corrections=0.2)
    # a tenth of half would be .05; the other two give way in proportion, .45 : .5
    np.testing.assert_allclose(
        sampler.weights(np.array([[90, 10, 50]])), [[0.8 * 0.45 / 0.95, 0.2, 0.8 * 0.5 / 0.95]], atol=1e-12
    )
    np.testing.assert_allclose(sampler.weights(np.array([[20, 80, 50]])), [[0.1, 0.4, 0.5]], atol=1e-12)
    np.testing.assert_allclose(sampler.weights(np.array([[90, 10, 0]])), [[0.8, 0.2, 0.0]], atol=1e-12)
    np.testing.assert_allclose(sampler.weights(np.array([[0, 7, 0]])), [[0.0, 1.0, 0.0]], atol=1e-12)


def test_the_online_loss_counts_corrections_as_many_as_they_are() -> None:
    sampler = AdaptiveSampler(SamplerConfig(a=1.0, min_corrections=0.0))
    drawn = np.array([[0, ONLINE], [0, CORRECTIONS], [0, OFFLINE]])
    sampler.record(drawn, np.array([0.4, 2.4, 0.9]))
    # 3 : 1 of .4 and 2.4 is .9, the loss of what was recorded
    np.testing.assert_allclose(sampler.weights(np.array([[30, 10, 5]])), [[0.375, 0.125, 0.5]], atol=1e-12)


def test_the_loss_is_the_mean_of_the_last_steps() -> None:
    sampler = AdaptiveSampler(SamplerConfig(a=1.0, window=2))
    drawn = np.array([[0, ONLINE], [0, ONLINE], [0, OFFLINE]])
    for online in (9.0, 1.0, 2.0):
        sampler.record(drawn, np.array([online - 0.5, online + 0.5, 1.5]))
    np.testing.assert_allclose(sampler.weights(BOTH), [[0.5, 0.0, 0.5]], atol=1e-12)


def test_the_draws_have_the_frequencies_of_the_weights() -> None:
    sampler, counts = sampler_with(1.4, 0.7), np.array([[40, 10, 50], [0, 0, 9], [5, 0, 5]])
    drawn = sampler.draw(counts, 60_000, np.random.default_rng(0))
    weights = sampler.weights(counts)
    found = np.zeros_like(weights)
    np.add.at(found, (drawn[:, 0], drawn[:, 1]), 1 / len(drawn))
    assert (np.abs(found - weights) <= 5 * np.sqrt(weights * (1 - weights) / len(drawn))).all()
    assert found[0, ONLINE] > 0.1 and found[1, ONLINE] == 0.0


def test_saved_and_restored_it_goes_on_the_same() -> None:
    sampler = sampler_with(1.0, 0.4, window=3)
    restored = AdaptiveSampler(sampler.config)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for each in (sampler, restored):
        for loss in (0.1, 0.2, 0.3):
            each.record(np.array([[0, ONLINE]]), np.array([loss]))
    np.testing.assert_array_equal(restored.weights(BOTH), sampler.weights(BOTH))
