"""Imagined rollouts at their limits: what resampling replays, renewal, horizon, deadline and thresholds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.world_models.small_models import imagined_env
from tests.world_models.test_env import keyframes_at
from vla_rl.contract.check import random_actions
from vla_rl.contract.errors import UserError
from world_models.config import Limits
from world_models.env import ImaginedEnv
from world_models.types import Future

EVERY = np.arange(24)


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


def test_a_success_that_flips_in_a_second_rollout_is_none():
    """Both outcomes follow from playing the same actions from the same start with either noise."""
    env_ids, causes, flipped = np.arange(32), {}, imagined_env(32, keyframe_share=0.0)
    flipped.reset(env_ids, env_ids)
    actions = random_actions(flipped, 6, np.random.default_rng(9))
    limit = float(np.median(flipped.step(actions).obs.images["front"].mean((1, 2, 3))))
    kinds = {"first": {"resamples": 0}, "second": {"resamples": 0, "noise_seed": 1}, "both": {"resamples": 1}}
    for name, numbers in kinds.items():
        env = imagined_env(32, keyframe_share=0.0, success_threshold=0.5, **numbers)
        env.model.predict = BrightIsDone(env, limit)  # the second imagined rollout's model is the same
        env.reset(env_ids, env_ids)
        step = env.step(actions)
        causes[name] = np.array(step.cause)
        assert (step.reward.sum(1) == step.success).all()
    first, second = (causes[name] == "success" for name in ("first", "second"))
    assert (first & second).any() and (first & ~second).any()
    earlier = causes["both"] == "success"
    assert not (earlier & ~first).any() and not (earlier & ~second).any()
    assert set(causes["both"][first & ~second]) == {"uncertainty"} and not (causes["both"][~first] == "success").any()


def test_a_success_from_a_keyframe_is_resampled_from_there():
    """With any noise it happens again, also where the episode's deadline ends the call."""
    env, env_ids = keyframes_at(7, horizon=8, success_threshold=0.0, resamples=1, deadline=9), np.arange(3)
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 3, np.random.default_rng(4)))
    assert set(step.cause) == {"success"} and step.obs.time.tolist() == [9] * 3
    env = keyframes_at(7, horizon=8, success_threshold=0.0, resamples=1)
    env.reset(env_ids, env_ids)
    snapshot = env.snapshot(env_ids)
    step = env.step(random_actions(env, 3, np.random.default_rng(4)))
    assert set(step.cause) == {"success"} and step.obs.time.tolist() == [10] * 3
    env.reset(env_ids, env_ids + 9)
    assert env.restore(env_ids, snapshot).time.tolist() == [7] * 3
    assert set(env.step(random_actions(env, 3, np.random.default_rng(4))).cause) == {"success"}


@pytest.mark.full
def test_a_renewed_environment_resamples_with_its_noise():
    fresh, renewed = resampling_env(), resampling_env()
    renewed.renew(renewed.initial_states, None, renewed.config)
    causes = [[env.step(actions(seed)).cause for seed in (0, 1)] for env in (fresh, renewed)]
    assert {"success", "uncertainty"} <= set(causes[0][0]) | set(causes[0][1])
    assert causes[0] == causes[1]


def ends(env: ImaginedEnv) -> list[int]:
    """When each rollout ends, in control steps, if nothing but the horizon ends it."""
    obs = env.reset(np.arange(env.num_envs), np.arange(env.num_envs))
    while not (step := env.step(random_actions(env, 3, np.random.default_rng(0)))).done.all():
        assert obs.time.max() < env.config.horizon
    return list(step.obs.time)


@pytest.mark.parametrize("before, after", [(12, 6), (4, 11)])
def test_a_renewed_environment_plays_its_new_horizon(before, after):
    """Longer or shorter, with resampling; what it declares is what it plays."""
    env = imagined_env(3, horizon=before, longest=12)
    assert env.spec.time_limit == before and ends(env) == [before] * 3
    env.renew(env.initial_states, None, replace(env.config, horizon=after))
    assert env.config.horizon == env.spec.time_limit == after and ends(env) == [after] * 3
    for other in env._resampling_envs:
        assert other.config.horizon == after, "or a late success would never be confirmed"
    fresh = imagined_env(3, horizon=after, longest=12)
    assert env.spec == fresh.spec and env.spec.max_chunk == 12
    with pytest.raises(UserError, match="horizon of 13 control steps is beyond the 12"):
        env.renew(env.initial_states, None, replace(env.config, horizon=13))
    with pytest.raises(UserError, match="nothing to imagine"):
        imagined_env(2, horizon=0)


@pytest.mark.parametrize("before, after", [(12, 6)])
def test_a_snapshot_of_a_renewed_environment_fits_a_new_one(before, after):
    """As in a resumed run; the rollout is older than neither horizon and goes on bit for bit."""
    renewed, ids = imagined_env(3, horizon=before, longest=12), np.arange(3)
    renewed.reset(ids, ids)
    renewed.step(random_actions(renewed, 3, np.random.default_rng(0)))
    earlier = renewed.snapshot(ids)
    renewed.renew(renewed.initial_states, None, replace(renewed.config, horizon=after))
    fresh = imagined_env(3, horizon=after, longest=12)
    for saved in (earlier, renewed.snapshot(ids)):
        fresh.restore(ids, saved)
        renewed.restore(ids, saved)
        chunk = random_actions(fresh, 3, np.random.default_rng(1))
        one, two = renewed.step(chunk), fresh.step(chunk)
        np.testing.assert_array_equal(one.obs.state, two.obs.state)
        assert one.cause == two.cause and list(one.done) == [after == 6] * 3


def test_a_restored_rollout_is_resampled_from_its_own_beginning():
    env, other = resampling_env(), resampling_env()
    env.step(actions(0))
    saved = env.snapshot(EVERY)
    other.reset(EVERY, 100 + EVERY)
    other.step(actions(5))
    other.restore(EVERY, saved)
    np.testing.assert_array_equal(other.uncertainty, env.uncertainty)
    np.testing.assert_array_equal(other.outcome, env.outcome)
    one, two = env.step(actions(1)), other.step(actions(1))
    assert one.cause == two.cause
    assert {"success", "uncertainty"} <= set(one.cause)


def test_a_success_that_resampling_reaches_later_does_not_count():
    """Of two rollouts that succeed now, the first is three control steps old, and resampling succeeds after six."""
    env = imagined_env(2, keyframe_share=0.0, success_threshold=0.5)
    other = env._resampling_envs[0]
    resampled = other._predict

    def after_six(env_ids: np.ndarray, complete: np.ndarray) -> Future:
        future = resampled(env_ids, complete)
        done = torch.from_numpy((other._book.time[env_ids] >= 6).astype(np.float32))
        return replace(future, outcome=done[:, None] * torch.tensor([1.0, 0.0, 0.0]))

    other._predict = after_six  # type: ignore[method-assign]
    both, chunk = np.arange(2), random_actions(env, 3, np.random.default_rng(0))
    predict = env._predict
    env._predict = lambda *ids: replace(predict(*ids), outcome=torch.zeros(len(ids[0]), 3))  # type: ignore[method-assign]
    env.reset(both, both)
    env.step(chunk)
    env.reset(both[:1], both[:1])
    done = torch.tensor([1.0, 0.0, 0.0])
    env._predict = lambda *ids: replace(predict(*ids), outcome=done.expand(len(ids[0]), 3))  # type: ignore[method-assign]
    assert list(env.step(chunk).cause) == ["uncertainty", "success"]


def last_step(**numbers: Any) -> Any:
    """The end of a rollout whose outcome is certain: done, failed or neither."""
    outcome = torch.tensor(numbers.pop("outcome", [0.0, 0.0, 0.0]))
    env = imagined_env(2, **{"success_threshold": 1.0, "failure_threshold": 1.0, "resamples": 0, **numbers})
    predict = env._predict
    env._predict = lambda *ids: replace(predict(*ids), outcome=outcome.expand(len(ids[0]), 3))  # type: ignore[method-assign]
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
def test_success_counts_before_failure_and_failure_before_time(numbers, cause, terminated):
    """Thresholds are reached, not exceeded: every outcome here equals its threshold, every time its limit."""
    step = last_step(**numbers)
    assert set(step.cause) == {cause} and step.terminated.all() == terminated
    assert step.truncated.all() == (cause == "time_limit")


@pytest.mark.parametrize(("share", "ended"), [(1.0, 0), (0.999, 1)])
def test_an_uncertainty_ends_a_rollout_above_its_limit_only(share, ended):
    env, ids = imagined_env(4, resamples=0), np.arange(4)
    env.reset(ids, ids)
    chunk = random_actions(env, 3, np.random.default_rng(0))
    env.step(chunk)
    env.limits = Limits((share * float(env.uncertainty.max()),) * 4)
    env.reset(ids, ids)
    assert sum(cause == "uncertainty" for cause in env.step(chunk).cause) == ended
