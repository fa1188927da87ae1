"""Our environments through Gymnasium: its checkers pass, and native rows play what single environments play."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode

from sims.as_gymnasium import ActionScale, GymnasiumVectorEnv, ObservationView
from sims.catalog import make
from sims.mujoco.tabletop import LIFT_HEIGHT
from sims.mujoco.tasks.lift import potential
from tests.catalog_options import needed_options
from vla_rl.contract.check import check_env as check_ours
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError

_LIFT = "sims.mujoco.tasks.lift"
NAMES = ("lift", "counting", "point_mass")  # with pictures, several instructions, and a state alone
LIFT = {"id": "vla_rl/lift-v0", "render": False, "privileged": True, "deadline": 9, "potential": f"{_LIFT}:potential"}
COUNTING = {"id": "vla_rl/counting-v0"}
SHORT = {"id": "vla_rl/counting-v0", "max_episode_steps": 7}  # many of its episodes are longer
PLAYED = [(COUNTING, "NextStep"), (COUNTING, "Disabled"), (LIFT, "SameStep"), (SHORT, "NextStep"), (SHORT, "SameStep")]


@pytest.mark.parametrize("name", NAMES)
def test_gymnasiums_checker_passes_without_a_warning(name):
    env = gymnasium.make(f"vla_rl/{name}-v0", privileged=True, **needed_options(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


def played(envs, steps: int = 40) -> list:
    """Everything a learner gets from ``envs`` for a fixed sequence of actions, with the resets that Disabled needs."""
    envs.action_space.seed(7)
    found = [envs.reset(seed=3)]
    for _ in range(steps):
        step = envs.step(envs.action_space.sample())
        found.append(step)
        ended = step[2] | step[3]
        if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and ended.any():
            found.append(envs.reset(options={"reset_mask": ended}))
    envs.close()
    return found


@pytest.mark.parametrize(("options", "mode"), PLAYED)
def test_native_rows_play_what_single_environments_play(options, mode):
    native = gymnasium.make_vec(**options, num_envs=3, autoreset_mode=mode)
    assert isinstance(native, GymnasiumVectorEnv) and native.metadata["autoreset_mode"].value == mode
    singles = gymnasium.make_vec(
        **options, num_envs=3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    assert native.observation_space == singles.observation_space and native.action_space == singles.action_space
    one, other = played(native), played(singles)
    assert sum(bool((item[2] | item[3]).any()) for item in one if len(item) == 5) >= 2
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert all(data_equivalence(x, y, exact=True) for x, y in zip(a, b, strict=True)), (i, a, b)


def test_the_increase_of_a_potential_is_added_to_the_reward():
    """Over an episode it adds up to the difference between its end and its start, in every row for itself."""
    envs = gymnasium.make_vec(**LIFT, num_envs=2, autoreset_mode="Disabled")
    envs.reset(seed=[1, 2])
    first, total = potential(envs.env.reset([], [])), np.zeros(2)
    for _ in range(5):
        _, reward, *_ = envs.step(np.array([[0.3, 0.2, -1, 1], [0, 0, -1, -1]], np.float32))
        total += reward
    last = potential(envs.env.reset([], []))
    assert np.allclose(total, last - first) and (np.abs(last - first) > 1e-3).all() and last[0] != last[1]
    place = np.zeros((3, 3), np.float32)
    place[1:, 2] = LIFT_HEIGHT, 0.02
    state = np.zeros((3, 8), np.float32)
    state[1, 2], state[2, 0] = LIFT_HEIGHT, 9.0
    time = np.zeros(3, np.int64)
    made = potential(Observation({}, state, time, time, {"privileged/target": place}))
    assert np.allclose(made, [0.5, 1.0, 0.0], atol=0.03)


def test_a_row_that_ended_is_not_stepped_without_autoreset():
    envs = gymnasium.make_vec("vla_rl/point_mass-v0", num_envs=2, autoreset_mode="Disabled")
    envs.reset(seed=0)
    for _ in range(16):
        *_, truncated, infos = envs.step(np.zeros((2, 2), np.float32))
    assert truncated.all() and infos["cause"].tolist() == ["time_limit"] * 2
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"rows \[0, 1\] have ended.*reset_mask"):
        envs.step(np.zeros((2, 2), np.float32))
    envs.reset(seed=[5, None], options={"reset_mask": np.array([True, False])})
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"rows \[1\]"):
        envs.step(np.zeros((2, 2), np.float32))


def test_what_is_seen_and_what_is_not():
    spec = make("lift", num_envs=1, render=False).spec
    shown = ObservationView(make("lift", num_envs=1).spec, privileged=False).space
    assert isinstance(shown, Dict) and set(shown.spaces) == {"state", "images/front", "task"}
    assert shown["task"] == Discrete(4) and shown["images/front"].dtype == np.uint8
    hidden = ObservationView(spec, privileged=True).space
    assert set(hidden.spaces) == {"state", "task", *spec.extras} and hidden["privileged/lifted"].shape == (1,)
    assert isinstance(ObservationView(make("point_mass", num_envs=1).spec, privileged=False).space, Box)
    blind = make("gym", num_envs=1, id="Pendulum-v1", privileged={"all": [0, 1, 2]}).spec
    with pytest.raises(UserError, match=r"neither state nor images .* privileged=True"):
        ObservationView(blind, privileged=False)


def test_actions_are_scaled_or_physical_or_stay_discrete():
    spec = make("point_mass", num_envs=1).spec
    scaled, physical = ActionScale(spec, True), ActionScale(spec, False)
    assert np.allclose(scaled.to_env(np.array([[1.0, -0.5]])), [[0.2, -0.1]])
    assert physical.space == Box(np.float32(-0.2), np.float32(0.2), (2,))
    assert np.array_equal(physical.to_env(np.array([[0.2, -0.1]])), [[0.2, -0.1]])
    envs = GymnasiumVectorEnv(make("gym", num_envs=2, id="CartPole-v1"))
    assert envs.single_action_space == Discrete(2)
    played(envs)
    wide = ActionScale(make("gym", num_envs=1, id="TestWide-v0", success_key="").spec, True)
    assert wide.space == MultiDiscrete([3, 2], start=[1, 0]) and wide.to_env(np.array([[3, 1]])).tolist() == [[3, 1]]


class Wide(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (1,)), MultiDiscrete([3, 2], start=[1, 0])


gymnasium.register("TestWide-v0", Wide, max_episode_steps=3)


@pytest.mark.parametrize("mode", ["", "sync", "vector_entry_point"])
def test_there_and_back_it_is_the_same_environment(mode):
    """And the same episode of a seed; the id can name the module that registers it."""
    ours, options = make("point_mass", num_envs=3), {"id": "sims.as_gymnasium:vla_rl/point_mass-v0", "time_limit": 16}
    arguments = {"rescale_actions": False}
    back = make("gym", num_envs=3, vectorization_mode=mode, arguments=arguments, **options)
    assert len(check_ours(back, seed=2)) == 7
    actions = np.random.default_rng(0).uniform(-0.2, 0.2, (3, 16, 2)).astype(np.float32)
    for env in (ours, back):
        env.reset([0, 1, 2], [5, 6, 7])
    one, other = ours.step(actions), back.step(actions)
    assert np.array_equal(one.obs.state, other.obs.state) and np.array_equal(one.reward, other.reward)
    assert np.array_equal(one.truncated, other.truncated)


def test_pictures_are_rendered_for_people_where_possible():
    env = gymnasium.make("vla_rl/lift-v0", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (256, 256, 3)
    env.close()
    envs = gymnasium.make_vec("vla_rl/counting-v0", num_envs=2, render_mode="rgb_array")
    with pytest.raises(gymnasium.error.ResetNeeded, match="no episode"):
        envs.render()
    obs, _ = envs.reset(seed=1)
    assert np.array_equal(np.stack(envs.render()), obs["images/" + next(iter(envs.env.spec.images))])
