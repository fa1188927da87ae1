"""Boundaries, snapshots and renewal of imagined rollouts: horizon, deadline, thresholds and what resampling replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.world_models.small_models import imagined_env
from vla_rl.contract.check import random_actions
from world_models.env import ImaginedEnv
from world_models.types import Future
from world_models.uncertainty import Limits

EVERY = np.arange(40)


class BrightIsDone:
    """``predict`` whose outcome is done when the picture is brighter than ``limit``, which noise decides."""

    def __init__(self, env: ImaginedEnv, limit: float) -> None:
        self.predict, self.limit = env.model.predict, limit

    def __call__(self, *given: Any) -> Future:
        future = self.predict(*given)
        bright = future.pictures[:, -1].float().mean((1, 2, 3)) > self.limit
        return replace(future, outcome=bright.float()[:, None] * torch.tensor([1.0, 0.0, 0.0]))


def resampling_env() -> ImaginedEnv:
    """An environment in which about half of all successes at the end of the second call fail when resampled."""
    env = imagined_env(len(EVERY), keyframe_share=0.0, success_threshold=0.5)
    env.model.predict = BrightIsDone(env, 128.0)  # type: ignore[method-assign]
    env.reset(EVERY, EVERY)
    brightness = env.step(actions(0)).obs.images["front"].mean((1, 2, 3))
    env.model.predict.limit = float(np.quantile(brightness, 0.7))  # type: ignore[attr-defined]
    env.reset(EVERY, EVERY)
    return env


def actions(seed: int) -> np.ndarray:
    return random_actions(imagined_env(len(EVERY)), 3, np.random.default_rng(seed))


def test_a_renewed_environment_resamples_with_the_noise_and_the_horizon_that_it_had():
    fresh, renewed = resampling_env(), resampling_env()
    renewed.renew(renewed.initial_states, None, replace(renewed.config, horizon=15))
    assert renewed.config.horizon == 12, "a horizon only becomes shorter"
    causes = [[env.step(actions(seed)).cause for seed in (0, 1)] for env in (fresh, renewed)]
    assert {"success", "uncertainty"} <= set(causes[0][0]) | set(causes[0][1])
    assert causes[0] == causes[1]
    renewed.renew(renewed.initial_states, None, replace(renewed.config, horizon=6))
    assert renewed.config.horizon == 6


def test_a_restored_rollout_is_resampled_from_its_own_beginning_with_its_own_actions():
    env, other = resampling_env(), resampling_env()
    env.step(actions(0))
    saved = env.snapshot(EVERY)
    other.reset(EVERY, 100 + EVERY)
    other.step(actions(5))
    other.restore(EVERY, saved)
    np.testing.assert_array_equal(other.uncertainty, env.uncertainty)
    np.testing.assert_array_equal(other.outcome, env.outcome)
    open_ended = ~env.snapshot(EVERY)["done"] if "done" in saved else np.ones(len(EVERY), bool)
    one, two = env.step(actions(1)), other.step(actions(1))
    assert one.cause == two.cause and open_ended.any()
    assert {"success", "uncertainty"} <= set(one.cause)


def test_a_success_that_resampling_reaches_later_does_not_count():
    """Of two rollouts that succeed now, the first is three control steps old, and resampling succeeds after six."""
    env = imagined_env(2, keyframe_share=0.0, success_threshold=0.5)
    other = env._resampling_envs[0]
    resampled = other._predict

    def after_six(env_ids: np.ndarray) -> Future:
        future = resampled(env_ids)
        done = torch.from_numpy((other._book.time[env_ids] >= 6).astype(np.float32))
        return replace(future, outcome=done[:, None] * torch.tensor([1.0, 0.0, 0.0]))

    other._predict = after_six  # type: ignore[method-assign]
    both, chunk = np.arange(2), random_actions(env, 3, np.random.default_rng(0))
    predict = env._predict
    env._predict = lambda ids: replace(predict(ids), outcome=torch.zeros(len(ids), 3))  # type: ignore[method-assign]
    env.reset(both, both)
    env.step(chunk)
    env.reset(both[:1], both[:1])
    done = torch.tensor([1.0, 0.0, 0.0])
    env._predict = lambda ids: replace(predict(ids), outcome=done.expand(len(ids), 3))  # type: ignore[method-assign]
    assert list(env.step(chunk).cause) == ["uncertainty", "success"]


def last_step(**numbers: Any) -> Any:
    """The end of a rollout whose outcome is certain: done, failed or neither."""
    outcome = torch.tensor(numbers.pop("outcome", [0.0, 0.0, 0.0]))
    env = imagined_env(2, **{"success_threshold": 1.0, "failure_threshold": 1.0, "resamples": 0, **numbers})
    predict = env._predict
    env._predict = lambda ids: replace(predict(ids), outcome=outcome.expand(len(ids), 3))  # type: ignore[method-assign]
    env.reset(np.arange(2), np.arange(2))
    return env.step(random_actions(env, 3, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("numbers", "cause", "terminated"),
    [
        ({"horizon": 3, "outcome": [0.0, 1.0, 0.0]}, "failed", True),
        ({"horizon": 3, "deadline": 3, "outcome": [1.0, 0.0, 0.0]}, "success", True),
        ({"horizon": 3, "deadline": 3, "outcome": [1.0, 1.0, 0.0]}, "success", True),
        ({"horizon": 3, "deadline": 3}, "too_late", True),
        ({"horizon": 3}, "time_limit", False),
        ({"horizon": 4}, "", False),
    ],
)
def test_of_two_reasons_to_end_at_once_success_counts_first_then_failure_then_time(numbers, cause, terminated):
    """Thresholds are reached, not exceeded: every outcome here equals its threshold, every time its limit."""
    step = last_step(**numbers)
    assert set(step.cause) == {cause} and step.terminated.all() == terminated
    assert step.truncated.all() == (cause == "time_limit")


def test_an_uncertainty_that_equals_its_limit_ends_nothing():
    env, ids = imagined_env(4, resamples=0), np.arange(4)
    env.reset(ids, ids)
    chunk = random_actions(env, 3, np.random.default_rng(0))
    env.step(chunk)
    highest = float(env.uncertainty.max())
    for limit, ended in ((highest, 0), (0.999 * highest, 1)):
        env = imagined_env(4, resamples=0, limits=Limits((limit,) * 4))
        env.reset(ids, ids)
        assert sum(cause == "uncertainty" for cause in env.step(chunk).cause) == ended
