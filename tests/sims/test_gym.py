"""Gymnasium's environments behind the contract: what Gymnasium plays, ends exact, and physics that varies."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from sims import catalog
from sims.catalog import make
from sims.gym import PHYSICS, GymEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.task import RANDOMIZATION

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


class Poisoned(Countdown):
    """Its third observation is not a number."""

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs + np.nan if self.taken == 3 else obs), *rest


for kind in (Countdown, Poisoned):
    gymnasium.register(f"Test{kind.__name__}-v0", kind, max_episode_steps=5)
gymnasium.register("TestTimeless-v0", Countdown)


def countdown(num_envs=3, **options) -> GymEnv:
    return make("gym", num_envs=num_envs, id="TestCountdown-v0", **options)


def test_every_task_of_the_configs_keeps_the_contract():
    ids = set(re.findall(r'EnvConfig\("gym", {"id": "([^"]+)"', CONFIGS.read_text()))
    for id in ("Humanoid-v5", *sorted(ids)):
        with closing(make("gym", num_envs=2, id=id, time_limit=9)) as env:
            assert len(check_env(env, seed=3)) == 7


def test_an_environment_without_success_never_reports_one():
    assert countdown().spec.success is None
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


def test_ends_inside_a_chunk_are_exact_and_rows_idle_until_reset():
    env = countdown()
    env.reset([0, 1, 2], [2, 5, 9])  # terminates early, at the limit, and would after it
    step = env.step(np.full((3, 5, 1), 0.5))
    assert step.valid.sum(1).tolist() == [2, 5, 5] and step.obs.time.tolist() == [2, 5, 5]
    assert step.terminated.tolist() == [True, True, False] and step.truncated.tolist() == [False, False, True]
    assert step.cause == ("terminated", "terminated", "time_limit") and not step.success.any()
    assert np.array_equal(step.reward[0], [1.5, 2.5, 0, 0, 0])
    assert np.array_equal(step.obs.state, [[2, 5], [5, 5], [5, 5]]), "the last one, not the next episode's first"
    env.reset([1], [9])
    later = env.step(np.ones((3, 1, 1)))
    assert later.valid[:, 0].tolist() == [False, True, False]
    assert np.array_equal(later.obs.state, [[2, 5], [1, 10], [5, 5]])


def test_an_observation_that_is_not_finite_is_not_handed_out():
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"id": "Hopper-v5", "arguments": {"legs": 3}}, r"cannot make 'Hopper-v5' .*legs.* check the id and its argum"),
        ({"id": "TestTimeless-v0"}, r"'TestTimeless-v0' has no time limit.* time_limit"),
        ({"privileged": {"speed": [4]}}, r"privileged 'speed' names the entries \[4\] .* from 0 to 3"),
        ({"privileged": {"speed": "fast"}}, r"privileged 'speed' is 'fast', which is no part .* numbers of entries"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make("gym", num_envs=1, **options)


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
    check_env(countdown(3, success_return=3.0), seed=0)


# -- physics that differs between environments and episodes ------------------------------------------------------------

PENDULUM = {"id": "InvertedPendulum-v5", "time_limit": 60}
ALL = {parameter.name: {"low": 0.5, "high": 1.5} for parameter in PHYSICS}


def play(env, steps=20):
    rng = np.random.default_rng(0)
    low, high = env.spec.action.low, env.spec.action.high
    chunks = [rng.uniform(low, high, (1, 1, env.spec.action_dim)).astype(np.float32) for _ in range(steps)]
    return np.stack([env.step(np.repeat(chunk, env.num_envs, 0)).obs.state for chunk in chunks])


def test_all_at_once_keep_the_contract_with_noise_and_latency(build):
    parameters = {**ALL, "latency": {"values": [0, 2]}, "action_noise": 0.1}
    env = build("randomize", num_envs=3, env="gym", options=PENDULUM, parameters=parameters)
    assert len(check_env(env, seed=3)) == 7
    assert [name for name in env.spec.extras[RANDOMIZATION].names] == [*ALL, "action_noise", "latency"]


def test_every_environment_has_its_own_model(build):
    env = build("gym", num_envs=3, id="Hopper-v5", time_limit=50)
    given = {"mass": [1.0, 2.0, 1.0], "friction": [1.0, 1.0, 0.5], "damping": [1.0, 3.0, 1.0]}
    given["gravity"] = [1.0, 1.0, 0.5]
    env.reset([0, 1, 2], [4, 4, 4], given)
    models = [one.unwrapped.model for one in env._rows._envs]
    for field, factors in (
        ("body_mass", (2.0, 1.0)),
        ("body_inertia", (2.0, 1.0)),
        ("geom_friction", (1.0, 0.5)),
        ("dof_damping", (3.0, 1.0)),
        ("body_subtreemass", (2.0, 1.0)),  # derived constants follow
    ):
        plain = getattr(models[0], field)
        for model, factor in zip(models[1:], factors, strict=True):
            assert np.allclose(getattr(model, field), plain * factor) and plain.any(), field
    assert [model.opt.gravity[2] for model in models] == pytest.approx([-9.81, -9.81, -4.905])


def test_nominal_episodes_are_gymnasiums_own_also_after_others(build):
    plain, env = (build("gym", num_envs=2, **PENDULUM) for _ in range(2))
    env.reset([0, 1], [7, 8], {"mass": [2.0, 2.0], "gravity": [1.5, 0.5]})
    varied = play(env)
    env.reset([0, 1], [7, 8])
    plain.reset([0, 1], [7, 8])
    expected = play(plain)
    assert np.array_equal(play(env), expected) and not np.array_equal(varied, expected)


def test_a_snapshot_takes_the_physics_to_another_environment(build):
    env = build("gym", num_envs=2, **PENDULUM)
    env.reset([0, 1], [5, 6], {"gravity": [2.0, 0.5], "mass": [2.0, 1.0]})
    play(env, 3)
    saved = env.snapshot([0])
    first = play(env, 5)[:, 0]
    env.reset([0, 1], [8, 9])
    env.restore([1], saved)
    assert np.array_equal(play(env, 5)[:, 1], first)


@pytest.mark.parametrize("options", [{"id": "CartPole-v1"}, {"id": "Hopper-v5", "vectorization_mode": "sync"}])
def test_other_environments_cannot_vary_it_and_say_so(options):
    assert catalog.parameters("gym", **options) == ()
    with pytest.raises(UserError, match=r"'gym' cannot vary 'mass'.*known: action_noise, latency"):
        make("randomize", num_envs=1, env="gym", options=options, parameters={"mass": 2.0})
