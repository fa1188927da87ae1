"""Several environments as one: every episode is that of its member, in the units of its member."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest

from sims.catalog import make, spec_of
from sims.toy.counting import CountingEnv
from vla_rl.cli import main
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError, UserError

THREE = ["point_mass", "counting", {"env": "lift", "options": {"image_size": 16}}]


@pytest.fixture
def env():
    with closing(make("multi_task", num_envs=3, envs=THREE)) as made:
        yield made


def test_tasks_families_and_cameras_are_those_of_the_members(env):
    assert len(check_env(env, seed=4)) == 7
    members = [spec_of("point_mass"), spec_of("counting"), spec_of("lift", image_size=16)]
    assert env.spec.tasks == tuple(text for one in members for text in one.tasks)
    assert env.spec.families[:3] == ("point_mass", "counting", "counting")
    assert set(env.spec.families[3:]) == {"lift"}
    assert set(env.spec.images) == {"audit", *members[2].images}
    assert env.spec.state.shape == (max(one.state.shape[0] for one in members),)
    assert env.spec.action_dim == max(one.action_dim for one in members)
    assert env.spec.time_limit == max(one.time_limit for one in members)


def test_an_episode_is_that_of_the_member_that_its_seed_chooses(env):
    """Number 7 of three members: the second one's seed 2; with padding, in its units, in any place."""
    obs = env.reset([0, 1, 2], [7, 3, 5])
    alone = make("counting", num_envs=1)
    own = alone.reset([0], [2])
    width, bounds = alone.spec.action_dim, alone.spec.action
    first = env.spec.tasks.index("count the even episode")
    for _ in range(16):  # past its end
        assert obs.state[0].tolist() == [*own.state[0].tolist(), *[0.0] * (env.spec.state.shape[0] - 4)]
        assert obs.task[0] == first + own.task[0] and (obs.images["audit"][0] == own.images["audit"][0]).all()
        assert not any(image[0].any() for name, image in obs.images.items() if name != "audit")
        chunk = np.full((3, 2, env.spec.action_dim), 0.25, np.float32)
        low, high = np.array(bounds.low), np.array(bounds.high)
        physical = np.broadcast_to(((low + high) / 2 + 0.25 * (high - low) / 2).astype(np.float32), (1, 2, width))
        step, expected = env.step(chunk), alone.step(physical)
        obs, own = step.obs, expected.obs
        for name in ("reward", "valid", "terminated", "truncated", "success"):
            assert np.array_equal(getattr(step, name)[0], getattr(expected, name)[0])
        assert step.cause[0] == expected.cause[0]
        padded = np.zeros((2, env.spec.action_dim), np.float32)
        padded[:, :width] = 0.25 * expected.valid[0][:, None]
        assert step.executed[0] == pytest.approx(padded, abs=1e-6)
    assert not step.valid[0].any()


def test_entries_beyond_the_members_own_are_ignored(env):
    env.reset([0, 1, 2], [0, 3, 6])  # the point mass in all three
    chunk = np.zeros((3, 4, env.spec.action_dim), np.float32)
    chunk[1, :, 2:] = 1.0
    chunk[2, :, 0] = 1.0
    step = env.step(chunk)
    assert not step.executed[1].any() and step.executed[2, :, 0].tolist() == [1.0] * 4
    assert step.reward[0] == pytest.approx(np.full(4, step.reward[0, 0]))  # nobody moved it


def test_members_that_are_not_played_are_not_stepped(env, monkeypatch):
    calls = []
    real = CountingEnv.step
    monkeypatch.setattr(CountingEnv, "step", lambda *given, **more: calls.append(1) or real(*given, **more))
    env.reset([0, 1, 2], [0, 3, 2])
    env.step(np.zeros((3, 1, env.spec.action_dim)))
    assert not calls
    env.reset([1], [1])
    env.step(np.zeros((3, 1, env.spec.action_dim)))
    assert len(calls) == 1


def test_members_in_other_processes_compute_at_the_same_time(tmp_path):
    """No step of theirs ends before both have begun, whichever is played first; the third computes here."""
    options = {"env": "tests.sims.isolation.troubled:meeting", "options": {"folder": str(tmp_path), "count": 2}}
    envs = [{"env": "isolated", "options": options}, "point_mass", {"env": "isolated", "options": options}]
    with closing(make("multi_task", num_envs=3, envs=envs)) as env:
        env.reset([0, 1, 2], [3, 4, 8])
        step = env.step(np.full((3, 2, env.spec.action_dim), 0.25), observe="all")
        assert step.valid.all() and step.obs.time.tolist() == [2, 2, 2] and step.cause == ("", "", "")
        assert [frame.time.tolist() for frame in step.frames] == [[1, 1, 1], [2, 2, 2]]


def test_a_snapshot_keeps_who_plays_what_and_how_episodes_ended(env):
    env.reset([0, 1, 2], [0, 1, 2])
    while not (step := env.step(np.zeros((3, 5, env.spec.action_dim)))).done[:2].all():
        pass
    saved = env.snapshot([0, 1, 2])
    env.reset([0, 1, 2], [4, 8, 12])
    obs = env.restore([0, 1, 2], saved)
    later = env.step(np.zeros((3, 1, env.spec.action_dim)))
    assert later.cause[:2] == step.cause[:2] and not later.valid[:2].any()
    assert obs.task.tolist() == step.obs.task.tolist()
    with pytest.raises(ContractError, match="nothing was restored"):
        env.restore([0], saved)


@pytest.mark.parametrize(
    ("envs", "sentence"),
    [
        ([], "envs is empty"),
        (["lfit"], "did you mean 'lift'"),
        ([{"name": "lift"}], "other fields than 'env' and 'options'"),
        (["lift", {"env": "place", "options": {"image_size": 16}}], "give both the same image_size"),
        (["lift", {"env": "gym", "options": {"id": "Pendulum-v1"}}], "Pendulum-v1 have no notion of success"),
    ],
)
def test_what_cannot_be_joined_is_refused(envs, sentence):
    with pytest.raises(UserError, match=sentence):
        make("multi_task", num_envs=1, envs=envs)


@pytest.mark.full
def test_a_learner_trains_on_two_simulators_at_once(tmp_path):
    envs = [{"env": "gym", "options": {"id": name}} for name in ("Pendulum-v1", "InvertedPendulum-v5")]
    small = {"rl.loop.iterations": 2, "rl.loop.validate-every": 1, "rl.algorithm.minibatch": 32}
    small |= {"rl.experience.num_envs": 4, "rl.experience.decisions": 16}
    small |= {"evaluation.validation": 2, "evaluation.test": 4, "evaluation.num_envs": 2}
    arguments = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    options = ["--env", "multi_task", "--env.options", json.dumps({"envs": envs})]
    main(["train", "gym.py:inverted_pendulum", "--out", str(tmp_path / "both"), *options, *arguments])
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert summary["env_steps"] == 2 * 4 * 16 and summary["return"]["episodes"] == 4
