"""A recorded episode is done again: in the simulated scene it succeeds again, and the way to its beginning is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from robot_drivers.record import Query
from tests.recipes.robots.arms import BLIND, OPTIONS, in_real_time, simulated
from tests.robot_drivers.simulated_robot import SimulatedProcess
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations, save_demonstrations
from vla_rl.recipes.robots import session
from vla_rl.recipes.robots.replay import Replayer, replay, stretched
from vla_rl.recipes.terminal import console


@pytest.fixture(scope="module")
def dataset(recorded):
    return recorded[1]


def beginning(dataset, count, folder, seed=None):
    """The first ``count`` control steps of the first episode, saved alone; of another scene with ``seed``."""
    episode = load_demonstrations(dataset, [0])
    part = {name: getattr(episode, name)[:count] for name in ("state", "task", "time", "action", "episode", "seed")}
    part |= {} if seed is None else {"seed": np.full_like(part["seed"], seed)}
    save_demonstrations(replace(episode, images={}, extras={}, **part), folder)
    return folder


def test_a_recorded_success_succeeds_again_where_it_was_recorded(dataset):
    done = replay(simulated(**BLIND), dataset, 1, 1.0, console)
    assert done.outcome == "success" and len(done.distance) > 0.9 * done.actions
    # The way to the first action may take a control step or two, in which the arm has moved already.
    assert np.abs(done.distance[:, :5]).max() < 0.02 and np.abs(done.distance[-1, :5]).max() < 0.01
    assert "the episode ended by success" in str(done) and "shoulder_pan.pos" in str(done)


def test_in_another_scene_it_is_executed_without_success(dataset, tmp_path):
    done = replay(simulated(**BLIND), beginning(dataset, 1000, tmp_path / "elsewhere", seed=3), 0, 1.0, console)
    assert done.outcome == "" and len(done.distance) == done.actions == len(load_demonstrations(dataset, [0]).action)


def test_at_half_the_speed_half_of_the_limits_are_kept(dataset, monkeypatch, tmp_path):
    seen, play = [], session.LockstepSession.play

    def watched(self, *arguments):
        for step in play(self, *arguments):
            seen.append(step.record.executed)
            yield step

    monkeypatch.setattr(session.LockstepSession, "play", watched)
    config = simulated(**BLIND)
    done = replay(config, beginning(dataset, 30, tmp_path / "part"), 0, 0.5, console)
    assert done.actions == pytest.approx(2 * 30, abs=2)
    velocity = [joint.velocity for joint in config.limits_of(config.open()).joints]
    assert (np.abs(np.diff(seen, axis=0)) * 25 <= 0.5 * np.array(velocity) + 1e-6).all()


def test_the_way_to_the_first_action_is_of_the_same_chunk():
    actions = np.array([[0.5], [0.6], [0.7]])
    decide = Replayer(actions, np.array([1.0]), 0.1)
    obs = Observation({}, np.array([[0.2]], np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    chunk = decide(Query(obs, 5, None, 0)).chunk
    np.testing.assert_allclose(chunk[:5, 0], [0.3, 0.4, 0.5, 0.6, 0.7], atol=1e-6)
    assert (chunk[5:] == 0.7).all() and len(chunk) == 5 + 5  # half a second at the last action
    assert not decide.over
    np.testing.assert_allclose(decide(Query(obs, 30, None, 0)).chunk, [[0.2]], atol=1e-6)  # somebody had taken over
    assert decide.over


def test_a_recording_is_interpolated_to_the_arms_rate_and_speed(dataset):
    episode = load_demonstrations(dataset, [0])
    count = len(episode.action)
    same, states = stretched(episode, 1 / 25, 1.0)
    np.testing.assert_array_equal(same, episode.action)
    np.testing.assert_array_equal(states, episode.state)
    slow, _ = stretched(episode, 1 / 50, 0.5)  # four of the arm's control steps for each recorded one
    assert len(slow) == 4 * (count - 1) + 1
    np.testing.assert_array_equal(slow[::4], episode.action)
    np.testing.assert_allclose(slow[2::4], (episode.action[:-1] + episode.action[1:]) / 2, atol=1e-6)
    fast, _ = stretched(replace(episode, fps=30.0), 1 / 25, 1.0)
    np.testing.assert_array_equal(fast[-1], episode.action[-1])


def test_another_arm_and_a_missing_episode_are_refused(dataset, tmp_path):
    episode = load_demonstrations(dataset, [0])
    swapped = episode.action_names[::-1]
    save_demonstrations(replace(episode, action_names=swapped), tmp_path / "other")
    with pytest.raises(UserError, match="would be mistaken for others; replay what was recorded on this arm"):
        replay(simulated(), tmp_path / "other", 0, 1.0, console)
    with pytest.raises(UserError, match="has no episode 7"):
        replay(simulated(), dataset, 7, 1.0, console)


@pytest.mark.full
def test_an_arm_in_real_time_does_it_too(dataset, tmp_path):
    """The first half second of an episode, on a simulated arm that is a process."""
    with SimulatedProcess(robot={"options": {**OPTIONS, "seconds": 600}}) as process:
        part = beginning(dataset, 12, tmp_path / "part")
        done = replay(in_real_time(process.address), part, 0, 1.0, console)
    assert done.outcome == "" and len(done.distance) == done.actions == 12
    assert np.abs(done.distance).max() < 0.5  # it follows, later than in virtual time
