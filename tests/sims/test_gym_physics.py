"""Masses, friction, damping and gravity of Gymnasium's MuJoCo tasks, per environment and per episode."""

from __future__ import annotations

from contextlib import ExitStack, closing

import numpy as np
import pytest

from sims import catalog
from sims.catalog import make
from sims.gym import PHYSICS
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import RANDOMIZATION

PENDULUM = {"id": "InvertedPendulum-v5", "time_limit": 60}
ALL = {parameter.name: {"low": 0.5, "high": 1.5} for parameter in PHYSICS}


@pytest.fixture
def build():
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(closing(make(*given, **options)))


def play(env, steps=20):
    rng = np.random.default_rng(0)
    low, high = env.spec.action.low, env.spec.action.high
    chunks = [rng.uniform(low, high, (1, 1, env.spec.action_dim)).astype(np.float32) for _ in range(steps)]
    return np.stack([env.step(np.repeat(chunk, env.num_envs, 0)).obs.state for chunk in chunks])


def test_all_of_them_at_once_keep_the_contract_with_noise_and_latency(build):
    parameters = {**ALL, "latency": {"values": [0, 2]}, "action_noise": 0.1}
    env = build("randomize", num_envs=3, env="gym", options=PENDULUM, parameters=parameters)
    assert len(check_env(env, seed=3)) == 7
    assert [name for name in env.spec.extras[RANDOMIZATION].names] == [*ALL, "action_noise", "latency"]


def test_discrete_actions_may_be_late(build):
    options = {"id": "CartPole-v1", "time_limit": 40}
    assert len(check_env(build("randomize", num_envs=2, env="gym", options=options, parameters={"latency": 2}))) == 7
    with pytest.raises(UserError, match=r"actions of 'CartPole-v1' are int64, to which no noise can be added"):
        make("randomize", num_envs=1, env="gym", options=options, parameters={"action_noise": 0.1})


def test_every_environment_has_its_own_model(build):
    env = build("gym", num_envs=3, id="Hopper-v5", time_limit=50)
    given = {
        "mass": [1.0, 2.0, 1.0],
        "friction": [1.0, 1.0, 0.5],
        "damping": [1.0, 3.0, 1.0],
        "gravity": [1.0, 1.0, 0.5],
    }
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


def test_nominal_episodes_are_gymnasium_s_own_bit_for_bit_also_after_others(build):
    plain, env = (build("gym", num_envs=2, **PENDULUM) for _ in range(2))
    env.reset([0, 1], [7, 8], {"mass": [2.0, 2.0], "gravity": [1.5, 0.5]})
    varied = play(env)
    env.reset([0, 1], [7, 8])
    plain.reset([0, 1], [7, 8])
    expected = play(plain)
    assert np.array_equal(play(env), expected) and not np.array_equal(varied, expected)


def test_a_pendulum_falls_sooner_where_gravity_is_stronger(build):
    env = build("gym", num_envs=2, **PENDULUM)
    env.reset([0, 1], [3, 3], {"gravity": [0.5, 2.0]})
    while not (step := env.step(np.zeros((2, 1, 1), np.float32))).done.all():
        pass
    assert step.obs.time[1] < step.obs.time[0]


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
