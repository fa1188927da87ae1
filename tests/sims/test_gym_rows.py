"""Vector environments play the episodes of single ones; what environments of others say is taken for what it is."""

from __future__ import annotations

from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv

from sims.catalog import make
from sims.gym import GymEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.env import Snapshots
from vla_rl.contract.errors import UserError


class Walk(gymnasium.Env):
    """A random walk that terminates after 1 to 6 steps; it observes (its seed's draw, steps, sum of noise)."""

    observation_space, action_space = Box(-np.inf, np.inf, (3,), np.float64), Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.steps, self.sum = int(self.np_random.integers(1, 7)), 0, 0.0
        return self._obs(), {}

    def step(self, action):
        self.steps, self.sum = self.steps + 1, self.sum + float(action[0]) + self.np_random.normal()
        return self._obs(), self.sum, self.steps >= self.length, False, {}

    def _obs(self):
        return np.array([self.length, self.steps, self.sum])


class Row(SyncVectorEnv):
    """A vector environment of its own kind, for ids without a single form."""

    def __init__(self, num_envs, max_episode_steps, autoreset_mode="NextStep"):
        limited = [lambda: gymnasium.wrappers.TimeLimit(Walk(), max_episode_steps)] * num_envs
        super().__init__(limited, autoreset_mode=autoreset_mode)


gymnasium.register("TestWalk-v0", Walk, max_episode_steps=4)
gymnasium.register("TestRow-v0", vector_entry_point=Row, max_episode_steps=4)


def episodes(env: GymEnv, resets: int = 9) -> list[tuple]:
    """Everything that came of a fixed sequence of chunks; rows are reset late, so that some idle in between."""
    rng, seed, found = np.random.default_rng(0), 100, []
    env.reset(np.arange(4), np.arange(4))
    for i in range(resets):
        step = env.step(rng.uniform(-1, 1, (4, 2, 1)), observe="all")
        found.append((step.obs.state, step.reward, step.valid, step.terminated, step.truncated, step.cause))
        found += [(frame.state, frame.time) for frame in step.frames]
        ended = np.flatnonzero(step.done)[: 1 + i % 2]
        found.append((env.reset(ended, seed + ended).state,))
        seed += 10
    return found


@pytest.fixture(scope="module")
def single():
    return episodes(make("gym", num_envs=4, id="TestWalk-v0"))


def same(one: list[tuple], other: list[tuple]) -> bool:
    return all(
        np.array_equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


WAYS = [("sync", "NextStep"), ("sync", "SameStep"), ("vector_entry_point", "Disabled")]


@pytest.mark.parametrize(("kind", "mode"), [*WAYS, ("async", "SameStep")])
def test_a_vector_environment_plays_the_episodes_of_single_ones(kind, mode, single):
    id, how = ("TestRow-v0", "arguments") if kind == "vector_entry_point" else ("TestWalk-v0", "vector_kwargs")
    env = make("gym", num_envs=4, id=id, vectorization_mode=kind, **{how: {"autoreset_mode": mode}})
    assert not isinstance(env, Snapshots) and same(episodes(env), single)
    env.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_id_with_a_vector_form_only_is_played_row_by_row(mode, single):
    env = make("gym", num_envs=4, id="TestRow-v0", arguments={"autoreset_mode": mode})
    assert isinstance(env, Snapshots) and same(episodes(env), single)
    assert len(check_env(env, seed=1)) == 7


def test_a_vector_environment_that_resets_all_rows_is_refused():
    sentence = r"'CartPole-v1' as CartPoleVectorEnv resets all .* leave vectorization_mode out"
    with pytest.raises(UserError, match=sentence):
        make("gym", num_envs=2, id="CartPole-v1", vectorization_mode="vector_entry_point")


# -- what environments of others say -----------------------------------------------------------------------------------

MODES = [("", ""), ("sync", "SameStep"), ("async", "SameStep")]


class Odd(gymnasium.Env):
    """Six steps, whose numbers are observed; what it returns goes through functions of a test."""

    def __init__(self, obs=lambda t: np.full(3, t / 10, np.float32), reward=lambda t: 1.0, flag=bool, info=None,
                 action=None, space=None, first=None):  # fmt: skip
        self.observation_space = space or Box(-1, 1, (3,), np.float32)
        self.action_space = action or Box(-1, 1, (2,), np.float32)
        self.obs, self.reward, self.flag, self.info, self.first = obs, reward, flag, info or (lambda t: {}), first

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.first() if self.first else (self.obs(0), {})

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self.obs(self.t), self.reward(self.t), self.flag(self.t >= 6), self.flag(False), self.info(self.t)


gymnasium.register("TestOdd-v0", Odd, max_episode_steps=50)


def odd(num_envs=2, mode="", autoreset="", success_key=None, action_bounds=None, **arguments):
    kwargs = {"vector_kwargs": {"autoreset_mode": autoreset}} if autoreset else {}
    return make("gym", num_envs=num_envs, id="TestOdd-v0", arguments=arguments, vectorization_mode=mode,
                success_key=success_key, action_bounds=action_bounds, **kwargs)  # fmt: skip


def played(env):
    """The step in which six actions end the episodes."""
    with closing(env):
        env.reset(np.arange(env.num_envs), np.arange(env.num_envs))
        return env.step(np.full((env.num_envs, 6, env.spec.action_dim), 0, env.spec.action.dtype))


class OneBuffer:
    """The same memory for every observation."""

    def __init__(self):
        self.buffer = np.zeros(3, np.float32)

    def __call__(self, t):
        self.buffer[:] = t / 10
        return self.buffer


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
def test_the_last_of_one_buffer_is_not_the_next_first(mode, autoreset):
    assert np.allclose(played(odd(3, mode, autoreset, obs=OneBuffer())).obs.state, 0.6)


@pytest.mark.parametrize("mode", ["", "sync"])
def test_a_reward_in_any_form_is_a_number(mode):
    for kind in (np.ones(1, np.float32), torch.ones(1), np.bool_(True), 1, True):
        step = played(odd(mode=mode, reward=lambda t, kind=kind: kind, flag=lambda end: np.full(1, end)))
        assert (step.reward == 1).all() and step.terminated.all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reward": lambda t: None}, "a reward that is None"),
        ({"reward": lambda t: np.ones(2)}, r"a reward that is a ndarray of shape \[2\]"),
        ({"flag": lambda end: None}, "a?terminated that is None"),
        ({"flag": lambda end: 0.5}, "terminated as 0.5, which is neither"),
        ({"obs": lambda t: np.zeros(4)}, r"float64\[4\] but a Box of float32\[3\]"),
        ({"space": Dict(a=Box(-1, 1, (3,)), b=Box(-1, 1, (3,))), "obs": lambda t: {"a": np.zeros(3)}}, "no part 'b'"),
        ({"space": Discrete(3), "obs": lambda t: t % 3 + 1}, r"is \[3\] but Discrete\(3\) is declared"),
        ({"space": Box(0, 255, (8, 8, 3), np.uint8), "obs": lambda t: np.ones((8, 8, 3))}, r"float64\[8, 8, 3\] but"),
        ({"reward": lambda t: 1 / (t - 2)}, r"step .* failed \(ZeroDivisionError: .*test_gym_rows.py:\d+\)"),
        ({"first": lambda: np.zeros(3)}, r"reset .* returned a ndarray of shape \[3\] instead of"),
        ({"info": lambda t: 5}, "instead of observation, reward, terminated"),
        ({"info": lambda t: {"success": 0.7}}, "neither true nor false"),
        ({"info": lambda t: {"success": False} if t < 6 else {}}, "has no info.*in the last step of an episode"),
        ({"success_key": "done"}, "has no info.*in the last step of an episode"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_a_sentence_with_the_environment(wrong, said):
    with pytest.raises(UserError, match=said) as caught:
        played(odd(**wrong))
    assert "'TestOdd-v0'" in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "autoreset", "key"), [("", "", "done"), ("sync", "SameStep", "success"), ("sync", "NextStep", "done")]
)
def test_success_in_info_is_that_of_the_last_step(mode, autoreset, key):
    chosen = {"success_key": key} if key == "done" else {}
    env = odd(mode=mode, autoreset=autoreset, info=lambda t: {key: np.float64(t % 3 == 0)}, **chosen)
    assert env.spec.success == "at_end" and env.success_from == f'info["{key}"]'
    with closing(env):
        env.reset([0, 1], [0, 1])
        assert not env.step(np.zeros((2, 3, 2))).success.any()  # it said so, but the episode went on
        assert env.step(np.zeros((2, 3, 2))).success.all()


def test_without_a_key_or_with_none_wanted_there_is_no_success():
    for env in (odd(), odd(info=lambda t: {"success": True}, success_key="")):
        assert env.spec.success is None and not played(env).success.any()


def test_a_reward_that_is_no_number_is_named_not_handed_out():
    env = odd(reward=lambda t: np.nan if t == 3 else 1.0)
    with pytest.warns(UserWarning, match=r"'TestOdd-v0' returned a reward that is not finite \(seed 0, time step 3\)"):
        step = played(env)
    assert step.cause == ("diverged",) * 2 and step.reward.sum() == 4 and step.valid.sum() == 6
    with pytest.warns(UserWarning, match="not finite"):
        found = {item.name: item.result for item in check_env(odd(reward=lambda t: np.nan if t == 3 else 1.0))}
    assert "2 ended because something was not finite" in found["episode"]


@pytest.mark.parametrize("end", [np.inf, np.finfo(np.float32).max])
def test_unbounded_actions_are_refused_with_advice_that_helps(end):
    space = Box(-end, end, (2,), np.float32)
    with pytest.raises(UserError, match=r"no bounds.*\"action_bounds\": \[-1, 1\]") as caught:
        odd(action=space)
    assert "RescaleAction" not in str(caught.value)
    env = odd(action=space, action_bounds=[-1, 1])
    assert env.spec.action.low == (-1.0, -1.0) and played(env).terminated.all()


def test_a_space_is_named_without_the_bounds_of_every_entry():
    mixed = Dict(move=Box(-1, 1, (24,)), grip=Discrete(2))
    with pytest.raises(UserError, match=r"Dict\(grip: Discrete\(2\), move: a Box of float32\[24\]\)|move: a Box"):
        odd(action=mixed)
