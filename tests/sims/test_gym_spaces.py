"""Gymnasium's spaces in the contract's terms: images, one vector, one-hot indices; discrete actions as indices."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from sims.catalog import make
from sims.gym_spaces import ActionWriter, ObservationReader
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError, UserError

PICTURE = Box(0, 255, (8, 12, 3), np.uint8)
EVERYTHING = Dict(
    {
        "arm": Dict({"angles": Box(-3.0, 3.0, (2,), np.float64), "wrist": PICTURE}),
        "board": Box(0, 255, (3, 3), np.uint8),
        "grey": Box(0, 255, (10, 9), np.uint8),
        "key": Discrete(3, start=5),
        "lamps": MultiBinary(2),
        "pair": Tuple((MultiDiscrete([2, 3]), Box(-1, 1, (2, 2), np.float32))),
        "stack": Box(0, 255, (4, 10, 9), np.uint8),
    }
)


class Everything(gymnasium.Env):
    """Observes a sample of its space and rewards what it was told to do."""

    def __init__(self):
        self.observation_space, self.action_space = deepcopy(EVERYTHING), MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action in self.action_space, action
        return self.observation_space.sample(), float(10 * action[0] + action[1]), False, False, {}


gymnasium.register("TestEverything-v0", Everything, max_episode_steps=6)


def test_an_observation_is_taken_apart():
    reader = ObservationReader("it", EVERYTHING)
    obs = EVERYTHING.sample()
    obs["arm"]["angles"] = np.array([0.5, -2.0])
    obs["key"], obs["lamps"], obs["pair"] = 6, np.array([1, 0], np.int8), (np.array([1, 2]), np.eye(2, dtype="f4"))
    obs["board"] = np.arange(9, dtype=np.uint8).reshape(3, 3)
    expected = [0.5, -2.0, *range(9), 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    others = EVERYTHING.sample()
    vectors = reader.vectors([others, obs])
    assert vectors[1].tolist() == expected and vectors.dtype == np.float32
    assert np.array_equal(vectors[:1], reader.vectors([others]))
    assert reader.low.tolist() == [-3, -3] + [0] * 9 + [0] * 3 + [0] * 2 + [0] * 5 + [-1] * 4
    assert reader.high.tolist() == [3, 3] + [255] * 9 + [1] * 3 + [1] * 2 + [1] * 5 + [1] * 4
    images, shapes = reader.images(obs), {"arm/wrist": (8, 12, 3), "grey": (10, 9, 1), "stack": (10, 9, 4)}
    assert {name: item.shape for name, item in images.items()} == shapes
    assert {name: item.shape for name, item in reader.image_specs.items()} == shapes
    assert np.array_equal(images["stack"][..., 2], obs["stack"][2])
    assert np.array_equal(images["grey"][..., 0], obs["grey"])


def test_such_an_environment_hides_the_parts_that_are_privileged():
    env = make("gym", num_envs=3, id="TestEverything-v0", privileged={"joints": "arm/angles", "first": [2]})
    assert len(check_env(env, seed=3)) == 7
    assert set(env.spec.images) == {"arm/wrist", "grey", "stack"} and env.spec.state.shape == (25 - 3,)
    assert env.spec.extras["privileged/joints"].low == (-3.0, -3.0)
    assert env.spec.extras["privileged/first"].shape == (1,)


def test_discrete_tasks_keep_the_contract():
    for id in ("CartPole-v1", "Taxi-v4", "Blackjack-v1"):
        env = make("gym", num_envs=3, id=id, time_limit=20)
        assert env.spec.discrete and len(check_env(env, seed=3)) == 7


def test_catch_rewards_what_it_says():
    """Its module registers it, when the id names it."""
    env = make("gym", num_envs=4, id="sims.catch:vla_rl/Catch-v0")
    assert env.spec.images["image"].shape == (20, 20, 1) and env.spec.state.shape == (0,)
    assert len(check_env(env)) == 7
    obs = env.reset(range(4), range(4))
    ball = obs.images["image"][:, 0, :, 0].argmax(1) // 2
    still = env.step(np.ones((4, 9, 1), np.int64))
    assert still.reward[:, :8].any() == 0 and still.terminated.all()
    assert still.reward[:, 8].tolist() == np.where(ball == 5, 1, -1).tolist()
    env.reset(range(4), range(4))
    moves = 1 + np.sign(ball - 5)[:, None] * (np.arange(9) < np.abs(ball - 5)[:, None])
    assert env.step(moves[..., None]).reward[:, 8].tolist() == [1] * 4


def test_discrete_actions_reach_a_process_of_its_own():
    with closing(make("isolated", num_envs=2, env="gym", options={"id": "CartPole-v1", "time_limit": 20})) as env:
        assert env.spec.discrete and len(check_env(env, seed=3)) == 7


def test_indices_count_from_where_the_space_starts():
    env = make("gym", num_envs=2, id="TestEverything-v0")
    assert (env.spec.action.dtype, env.spec.action.low, env.spec.action.high) == ("int64", (1, 0), (3, 1))
    env.reset([0, 1], [0, 0])
    step = env.step(np.array([[[1, 1]], [[3, 0]]]))
    assert step.reward.tolist() == [[11], [30]] and step.executed.dtype == np.int64
    clipped = env.step(np.array([[[-4, 9]], [[7, 0]]]))
    assert clipped.executed.tolist() == [[[1, 1]], [[3, 0]]]


def test_a_fraction_is_no_index_and_moves_nothing():
    env = make("gym", num_envs=2, id="CartPole-v1", time_limit=3)
    before = env.reset([0, 1], [0, 0]).state
    with pytest.raises(ContractError, match=r"action\[1,0,0\] is 0.5 but these actions are discrete"):
        env.step(np.array([[[0.0]], [[0.5]]]))
    assert np.array_equal(env.reset([], []).state, before)


@pytest.mark.parametrize(
    ("space", "vector", "action"),
    [
        (Discrete(4, start=-1), [2], np.int64(2)),
        (MultiBinary((2, 2)), [0, 1, 1, 0], np.array([[0, 1], [1, 0]], np.int8)),
        (Box(0, 5, (2,), np.int32), [4, 1], np.array([4, 1], np.int32)),
        (Box(-1, 1, (2, 1), np.float64), [0.5, -0.25], np.array([[0.5], [-0.25]])),
        (Dict(a=Box(-1, 1, (1,)), b=Box(0, 2, ())), [0.5, 2.0], {"a": np.array([0.5], "f4"), "b": np.array(2.0)}),
        (Tuple((Discrete(2), MultiDiscrete([3]))), [1, 2], (np.int64(1), np.array([2]))),
    ],
)
def test_actions_of_a_space_from_vectors(space, vector, action):
    write = ActionWriter("it", space)
    kind = "float32" if isinstance(vector[-1], float) else "int64"
    assert write.spec.dtype == kind and write.spec.shape == (len(vector),)
    (made,) = write(np.array([vector], kind))
    assert made in space
    np.testing.assert_equal(made, action)


@pytest.mark.parametrize(
    ("read", "space", "sentence"),
    [
        (ActionWriter, Dict(go=Discrete(2), speed=Box(0, 1)), "numbers and indices at once, which no policy chooses"),
        (ActionWriter, Box(-np.inf, 1, (2,)), "have no bounds"),
        (ActionWriter, Tuple((Text(3),)), "the action '0' of 'it' is Text.* neither numbers nor indices"),
        (ObservationReader, Dict(mission=Text(9)), "the observation 'mission' of 'it' is Text.*:FilterObservation"),
    ],
)
def test_spaces_without_a_policy_are_refused_in_one_sentence(read, space, sentence):
    with pytest.raises(UserError, match=sentence):
        read("it", space)


def test_wrappers_are_put_around_every_environment():
    stacked = {"gymnasium.wrappers:FrameStackObservation": {"stack_size": 3}}
    env = make("gym", num_envs=2, id="Pendulum-v1", wrappers=stacked)
    assert env.spec.state.shape == (9,)
    obs = env.reset([0, 1], [1, 2]).state
    assert np.array_equal(obs[:, :3], obs[:, 6:])
