"""Gymnasium's environments behind the contract: they are what Gymnasium plays, ends exact, nothing starts by itself."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from sims.catalog import make
from sims.gym import GymEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.normalization import Affine

CONFIGS = Path(__file__).parents[2] / "configs" / "gym.py"
HALF_CHEETAH = {"id": "HalfCheetah-v5", "time_limit": 12}


class Countdown(gymnasium.Env[np.ndarray, np.ndarray]):
    """Terminates after a number of actions given by its seed; observes (actions so far, 10 * last action)."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.length, self.taken = seed, 0
        return np.zeros(2), {}

    def step(self, action):
        self.taken += 1
        obs = np.array([self.taken, 10 * action[0]])
        return obs, float(action[0] + self.taken), self.taken >= self.length, False, {}


class Endless(Countdown):
    action_space = Box(-np.inf, np.inf, (1,), np.float32)


class Poisoned(Countdown):
    """Its third observation is not a number."""

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs + np.nan if self.taken == 3 else obs), *rest


for kind in (Countdown, Endless, Poisoned):
    gymnasium.register(f"Test{kind.__name__}-v0", kind, max_episode_steps=5)
gymnasium.register("TestTimeless-v0", Countdown)


def countdown(num_envs=3, **options) -> GymEnv:
    return make("gym", num_envs=num_envs, id="TestCountdown-v0", **options)


@pytest.mark.parametrize("id", ["Humanoid-v5", "Pendulum-v1"])
def test_tasks_of_many_kinds_keep_the_contract(id):
    env = make("gym", num_envs=3, id=id, time_limit=20, privileged={"some": [1, 2]})
    assert len(check_env(env, seed=3)) == 7
    env.close()


@pytest.mark.parametrize("id", sorted(set(re.findall(r'EnvConfig\("gym", {"id": "([^"]+)"', CONFIGS.read_text()))))
def test_every_task_of_a_config_keeps_the_contract(id):
    with closing(make("gym", num_envs=2, id=id, time_limit=9)) as env:
        assert len(check_env(env, seed=3)) == 7


def test_an_environment_without_success_never_reports_one():
    env = countdown()
    assert env.spec.success is None and EnvSpec.from_json(env.spec.to_json()) == env.spec
    wrong = make("counting", num_envs=2)
    wrong.spec = replace(wrong.spec, success=None)
    with pytest.raises(ContractError, match=r"an episode succeeded although spec\.success is None"):
        check_env(wrong)


def test_an_episode_is_the_one_that_gymnasium_plays():
    env, other = make("gym", num_envs=2, **HALF_CHEETAH), gymnasium.make("HalfCheetah-v5")
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 12, 6)).astype(np.float32)
    obs = env.reset([0, 1], [5, 77]).state
    step = env.step(actions, observe="all")
    for row, seed in enumerate((5, 77)):
        expected = other.reset(seed=seed)[0].astype(np.float32)
        assert np.array_equal(obs[row], expected)
        for i, frame in enumerate(step.frames):
            state, reward, *_ = other.step(actions[row, i])
            assert np.array_equal(frame.state[row], state.astype(np.float32))
            assert step.reward[row, i] == np.float32(reward)
    assert step.truncated.all() and not step.terminated.any() and step.cause == ("time_limit",) * 2


def test_ends_inside_a_chunk_are_exact_and_rows_idle_until_they_are_reset():
    env = countdown()
    env.reset([0, 1, 2], [2, 5, 9])  # terminates early, at the limit, and would after it
    step = env.step(np.full((3, 5, 1), 0.5))
    assert step.valid.sum(1).tolist() == [2, 5, 5] and step.obs.time.tolist() == [2, 5, 5]
    assert step.terminated.tolist() == [True, True, False] and step.truncated.tolist() == [False, False, True]
    assert step.cause == ("terminated", "terminated", "time_limit") and not step.success.any()
    assert np.array_equal(step.reward[0], [1.5, 2.5, 0, 0, 0])
    assert np.array_equal(step.obs.state, [[2, 5], [5, 5], [5, 5]]), (
        "the last observation, not the next episode's first"
    )
    env.reset([1], [9])
    later = env.step(np.ones((3, 1, 1)))
    assert later.valid[:, 0].tolist() == [False, True, False]
    assert np.array_equal(later.obs.state, [[2, 5], [1, 10], [5, 5]])


def test_an_observation_that_is_not_finite_truncates_and_is_not_handed_out():
    env = make("gym", num_envs=1, id="TestPoisoned-v0")
    env.reset([0], [9])
    step = env.step(np.ones((1, 5, 1)))
    assert step.cause == ("diverged",) and step.truncated.all() and step.valid.sum() == 3
    assert np.array_equal(step.obs.state, [[2, 10]]) and step.reward[0, 2] == 0


def test_privileged_entries_leave_the_state():
    env = countdown(privileged={"action": [1]})
    assert env.spec.state.shape == (1,) and set(env.spec.extras) == {"privileged/action"}
    env.reset([0, 1, 2], [9, 9, 9])
    obs = env.step(np.full((3, 1, 1), 2.0)).obs
    assert np.array_equal(obs.state, np.ones((3, 1))) and np.array_equal(obs.extras["privileged/action"], [[20]] * 3)
    assert not obs.public().extras


def test_a_snapshot_is_played_again_into_another_row():
    env = make("gym", num_envs=2, **HALF_CHEETAH)
    env.reset([0, 1], [1, 2])
    first, second = np.random.default_rng(1).uniform(-1, 1, (2, 2, 5, 6)).astype(np.float32)
    env.step(first)
    saved = env.snapshot([0])
    on = env.step(second).obs.state[0]
    env.restore([1], saved)
    assert np.array_equal(env.step(second[::-1].copy()).obs.state[1], on)


def test_infinite_bounds_are_declared_and_ask_for_statistics():
    spec = countdown().spec
    assert spec.state.low == (-np.inf,) * 2 and spec.action.high == (2.0,)
    with pytest.raises(ContractError, match="normalize by statistics of data"):
        Affine.from_bounds(spec.state)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"id": "HalfCheeta-v5"}, r"cannot make 'HalfCheeta-v5' .* check the id"),
        (
            {"id": "Hopper-v5", "arguments": {"legs": 3}},
            r"cannot make 'Hopper-v5' .*legs.* check the id and its arguments",
        ),
        ({"id": "TestEndless-v0"}, r"actions of 'TestEndless-v0' have no bounds"),
        ({"id": "TestTimeless-v0"}, r"'TestTimeless-v0' has no time limit.* time_limit"),
        ({"privileged": {"speed": [4]}}, r"privileged 'speed' names the entries \[4\] .* from 0 to 3"),
        ({"privileged": {"speed": [1, 1]}}, r"privileged 'speed' .* different ones"),
        ({"privileged": {"speed": "fast"}}, r"privileged 'speed' is 'fast', which is no part .* numbers of entries"),
        ({"vectorization_mode": "threads"}, r"cannot make 'InvertedPendulum-v5' .*threads"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make("gym", num_envs=1, **options)


def test_a_registry_without_a_limit_takes_the_option():
    assert make("gym", num_envs=1, id="TestTimeless-v0", time_limit=3).spec.time_limit == 3


def test_an_episode_whose_rewards_add_up_to_enough_has_succeeded():
    """1 + 2 + ... + length for actions of 0, which is 6 for three and 10 for four; the clock ends the fifth episode."""
    env = countdown(4, success_return=10.0)
    env.reset(np.arange(4), np.array([3, 4, 5, 9]))
    step = env.step(np.zeros((4, 4, 1)))
    assert env.spec.success == "at_end" and step.success.tolist() == [False, True, False, False]
    snapshot = env.snapshot(np.arange(4))
    for _ in range(2):  # restored rewards count once
        step = env.step(np.zeros((4, 1, 1)))
        assert step.success.tolist() == [False, True, True, True]
        assert [str(cause) for cause in step.cause] == ["terminated", "terminated", "terminated", "time_limit"]
        env.restore(np.arange(4), snapshot)
    env.reset(np.arange(4), np.array([3, 3, 3, 3]))
    assert not env.step(np.zeros((4, 5, 1))).success.any()
    assert countdown(1).spec.success is None
    check_env(countdown(3, success_return=3.0), seed=0)
