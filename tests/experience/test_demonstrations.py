"""Recorded episodes: complete, in order, only successes, cut into chunks inside their episode, kept on disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from tests.algorithms.test_hg_dagger import Table
from tests.auditing import AuditingPolicy
from tests.experience.makers import recorded
from tests.toys import Stateless, seeded
from tests.world_models.pushing import played
from vla_rl.algorithms.chunks import demonstrated, mean_loss
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.collect import collect_demonstrations, collect_trajectories
from vla_rl.experience.demonstrations import (
    Demonstrations,
    Trajectories,
    call_batch,
    context_at,
    make_sequences,
    sequence_batch,
)


def count(obs):
    """An expert that says which step it takes: [E,1,2]."""
    return np.stack([obs.time + 1, obs.state[:, 0]], -1)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def episodes():
    env = make("counting", num_envs=3)
    return collect_demonstrations(env, count, list(range(100, 108)))


def test_successes_are_recorded_once_complete_and_in_order(episodes):
    seeds = [100, 102, 104, 106]  # odd seeds are truncated without success
    lengths = episode_length(np.array(seeds))
    assert episodes.count == 4 and len(episodes.state) == lengths.sum()
    assert episodes.seed.tolist() == np.repeat(seeds, lengths).tolist()
    assert episodes.episode.tolist() == np.repeat(np.arange(4), lengths).tolist()
    assert episodes.time.tolist() == [step for n in lengths for step in range(n)]


def test_an_action_is_paired_with_the_observation_before_it(episodes):
    assert np.array_equal(episodes.action[:, 0], episodes.time + 1)
    assert np.array_equal(episodes.action[:, 1], episodes.seed) and np.array_equal(episodes.state[:, 0], episodes.seed)
    assert np.array_equal(episodes.state[:, 1], episodes.time)
    assert np.array_equal(episodes.images["audit"][:, 0, 0, 0], episodes.time)
    assert np.array_equal(episodes.task, episodes.seed % 2)


def test_a_chunk_ends_with_its_episode(episodes):
    chunks, shown = episodes.chunks(5)
    length = np.bincount(episodes.episode)[episodes.episode]
    expected = np.minimum(episodes.time[:, None] + 1 + np.arange(5), length[:, None])
    assert np.array_equal(chunks[..., 0], expected)
    assert np.array_equal(chunks[..., 1], np.repeat(episodes.seed[:, None], 5, 1))
    assert np.array_equal(shown, episodes.time[:, None] + 1 + np.arange(5) <= length[:, None])
    assert np.array_equal(episodes.chunks(1)[0][:, 0], episodes.action) and episodes.chunks(1)[1].all()


def test_names_units_and_flags_are_recorded_too(episodes):
    assert episodes.tasks == ("count the even episode", "count the odd episode") and episodes.fps == 10
    assert episodes.state_names == ("seed", "steps", "length", "echo") and episodes.action_names == ("steps", "seed")
    ends = np.diff(episodes.episode, append=99) > 0
    assert np.array_equal(episodes.extras["next.done"], ends) and np.array_equal(episodes.extras["next.success"], ends)
    assert np.array_equal(episodes.extras["next.reward"], expected_reward(episodes.time + 1))


def test_the_repeated_last_action_has_no_weight() -> None:
    four = replace(logged(True), action=np.arange(1, 5, dtype=np.float32)[:, None], episode=np.zeros(4, np.int64))
    policy, (actions, counts) = Table(), four.chunks(3)
    shown = demonstrated({}, torch.as_tensor(actions), torch.as_tensor(counts), torch.zeros(4, dtype=torch.long))
    loss = mean_loss(policy, shown, 1, seeded())
    assert float(loss.detach()) == pytest.approx((1 + 4 + 9 + 16 + 4 + 9 + 16 + 9 + 16) / 9)  # not of 12 actions
    loss.backward()
    assert policy.rows.grad is not None
    assert policy.rows.grad.flatten().tolist() == pytest.approx([-20 / 9, -18 / 9, -14 / 9])
    policy.rows.grad = None
    mean_loss(policy, shown.select(torch.tensor([3])), 1, seeded()).backward()
    assert policy.rows.grad.flatten().tolist() == [-8.0, 0.0, 0.0]


def test_joined_episodes_share_a_table_of_tasks(episodes):
    other = replace(episodes, tasks=("something else", "count the even episode"), task=episodes.task + 1)
    both = Demonstrations.joined([episodes, other])
    assert both.tasks == ("count the even episode", "count the odd episode", "something else")
    assert both.count == 8 and np.array_equal(both.chunks(3)[0][: len(episodes.state)], episodes.chunks(3)[0])
    assert np.array_equal(both.task, np.concatenate([episodes.task, episodes.task]))
    with pytest.raises(ContractError, match=r"with \['audit'\] cannot be joined"):
        Demonstrations.joined([episodes, replace(episodes, extras={})])


def test_tasks_are_renumbered_in_another_table(episodes):
    table = ("count sheep", "count the odd episode", "count the even episode")
    assert set(episodes.with_tasks(table).task) == {2} and episodes.with_tasks(table).tasks == table
    with pytest.raises(ContractError, match=r"'count the even episode', which is not in the table.*did you mean"):
        episodes.with_tasks(("count the odd episode",))


def test_episodes_of_several_rates_are_not_mixed(episodes):
    spec, slower = make("counting", num_envs=1).spec, replace(episodes, fps=5)
    assert episodes.for_env(spec).tasks == spec.tasks
    with pytest.raises(ContractError, match="have 5 control steps per second and 'counting' has 10, so an action"):
        slower.for_env(spec)
    with pytest.raises(ContractError, match="of 5 control steps per second cannot be joined to episodes of 10"):
        Demonstrations.joined([episodes, slower])
    assert Demonstrations.joined([episodes, replace(episodes, fps=10.05)]).count == 8  # a clock, rounded


def test_recording_needs_no_dataset_libraries_until_it_writes():
    code = "import sys, vla_rl.experience.demonstrations; assert not {'pyarrow', 'av'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- trajectories: nothing is lost between an environment and the training sequences of a world model ------------------


class Walker(Stateless):
    """Chunks of three actions, drawn from the generator."""

    def __init__(self, env) -> None:
        self.spec = env.spec

    def act(self, features, state, mode, generator):
        size = (len(features["state"]), 3, self.spec.action_dim)
        action = generator.uniform(self.spec.action.low, self.spec.action.high, size).astype(np.float32)
        return ActionOut(action, action, np.zeros(len(action), np.float32), {}, 0), state


def test_an_episode_has_every_time_step_and_the_actions_between():
    """Replayed action by action, the environment has the same frames."""
    env = make("point_mass", num_envs=3)
    trajectories = collect_trajectories(env, Walker(env), [5, 6, 7, 8], np.random.default_rng(0))
    assert trajectories.count == 4 and trajectories.steps == len(trajectories.state) - 4
    for (begin, end), seed in zip(trajectories.spans(), [5, 6, 7, 8], strict=True):
        assert (trajectories.seed[begin:end] == seed).all()
        obs, steps = env.reset(np.array([1]), np.array([seed])), []
        for moment in range(begin, end):
            np.testing.assert_array_equal(trajectories.state[moment], obs.state[1])
            if moment == end - 1:
                step = steps[-1]
                assert step.done[1] and trajectories.success[moment] == step.success[1]
                assert trajectories.failed[moment] == (step.terminated[1] and not step.success[1])
                assert not trajectories.action[moment].any() and not trajectories.reward[moment]
            else:
                assert not trajectories.success[moment] and not trajectories.failed[moment]
                steps.append(env.step(np.repeat(trajectories.action[moment][None, None], 3, 0)))
                assert trajectories.reward[moment] == steps[-1].reward[1, 0]
                obs = steps[-1].obs


def test_sequences_stay_inside_their_episode():
    trajectories = played(3, seed=0, length=7)
    table = make_sequences(trajectories, frames=2, context=2)
    assert len(table["count"]) == trajectories.steps
    for past, ahead, count in zip(table["past"], table["future"], table["count"], strict=True):
        ((begin, end),) = [span for span in trajectories.spans() if span[0] <= past[-1] < span[1]]
        step = past[-1]
        assert past.tolist() == [begin, max(begin, step - 2), step]
        assert ahead.tolist() == [min(step + i, end - 1) for i in (1, 2, 3, 4)]
        assert count == min(4, end - 1 - step)


def test_a_sequence_holds_context_actions_and_outcomes():
    trajectories = played(4, seed=2, length=7)
    table = make_sequences(trajectories, frames=2, context=2)
    chosen = np.arange(len(table["count"]))[::-1]
    batch = sequence_batch(trajectories, table, chosen)
    assert batch["pictures"].shape[1:] == (7, 3, 16, 16) and batch["state"].shape[1:] == (5, 3)
    assert 0 < trajectories.outcomes.sum() < 4
    for row, index in enumerate(chosen):
        step, ahead = table["past"][index, -1], table["future"][index]
        np.testing.assert_array_equal(batch["pictures"][row, 2], np.moveaxis(trajectories.images["front"][step], -1, 0))
        np.testing.assert_array_equal(
            batch["pictures"][row, 3], np.moveaxis(trajectories.images["front"][ahead[0]], -1, 0)
        )
        np.testing.assert_array_equal(batch["state"][row], trajectories.state[[step, *ahead]])
        np.testing.assert_array_equal(batch["actions"][row], trajectories.action[[step, *ahead[:-1]]])
        np.testing.assert_array_equal(batch["reward"][row], trajectories.reward[[step, *ahead[:-1]]])
        np.testing.assert_array_equal(batch["outcome"][row, :, 0], trajectories.success[ahead])
        np.testing.assert_array_equal(batch["outcome"][row, :, 1], trajectories.failed[ahead])
        (end,) = [end for begin, end in trajectories.spans() if begin <= step < end]
        assert (batch["outcome"][row, :, 2] == trajectories.success[end - 1]).all()
        assert batch["task"][row] == trajectories.task[step]


def test_a_call_is_the_first_half_of_its_sequence():
    trajectories = played(3, seed=0, length=7)
    table = make_sequences(trajectories, frames=2, context=2)
    index = np.arange(len(table["count"]))
    call, window = call_batch(trajectories, table, index), sequence_batch(trajectories, table, index)
    assert np.array_equal(call["count"], np.minimum(window["count"], 2)) and call["count"].max() == 2
    assert np.array_equal(call["state"], window["state"][:, :3])
    assert np.array_equal(call["actions"], window["actions"][:, :2])
    assert np.array_equal(call["pictures"], window["pictures"][:, 2])


def test_frames_and_outcomes_end_where_the_episode_ends():
    """Also inside a chunk, and while an environment waits for the others."""
    seeds = [300, 301, 302, 303, 304]
    found = collect_trajectories(make("counting", num_envs=3), AuditingPolicy(4), seeds, None)
    for (begin, end), seed in zip(found.spans(), seeds, strict=True):
        length = int(episode_length(np.array(seed)))
        assert found.state[begin:end, 1].tolist() == list(range(length + 1))
        assert found.success[begin:end].tolist() == [False] * length + [seed % 2 == 0]
        assert not found.failed[begin:end].any()


def test_context_at_equals_the_context_of_a_sequence():
    trajectories = played(3, seed=0, length=7)
    table = make_sequences(trajectories, frames=2, context=2)
    batch, start = (
        sequence_batch(trajectories, table, np.arange(8)),
        context_at(trajectories, table["past"][:8, -1], 2, 2),
    )
    np.testing.assert_array_equal(start["pictures"], batch["pictures"][:, :3])
    np.testing.assert_array_equal(start["state"], batch["state"][:, 0])
    np.testing.assert_array_equal(start["task"], batch["task"])
    begins = np.repeat(
        [begin for begin, _ in trajectories.spans()], [end - begin for begin, end in trajectories.spans()]
    )
    np.testing.assert_array_equal(start["time"], table["past"][:8, -1] - begins[table["past"][:8, -1]])


def test_episodes_are_selected_and_joined_without_loss():
    trajectories = played(4, seed=1)
    joined = Trajectories.joined([trajectories.select([0, 1]), trajectories.select([2, 3])])
    for name in ("state", "action", "episode", "success", "reward"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(trajectories, name))
    turned = trajectories.select([2, 0])
    assert turned.count == 2 and turned.outcomes.tolist() == trajectories.outcomes[[2, 0]].tolist()
    assert turned.episode.tolist() == sorted(turned.episode.tolist())


def logged(success: bool, **extras: np.ndarray) -> Demonstrations:
    """Two episodes of three control steps, as a LeRobot folder has them: no picture after the last action."""
    count, last = 6, np.array([False, False, True] * 2)
    wins = {"next.success": last & np.array([success] * 3 + [True] * 3)}
    return recorded(
        np.ones((count, 2), np.float32),
        images={"front": np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(3, -1)},
        state=np.arange(count, dtype=np.float32)[:, None],
        time=np.arange(count) % 3,
        episode=np.repeat([0, 1], 3),
        extras=wins | extras,
    )


def test_recorded_outcomes_are_at_the_last_picture():
    trajectories = Trajectories.from_demonstrations(
        logged(False, **{"next.terminated": np.array([False, False, True] * 2)})
    )
    assert (
        trajectories.outcomes.tolist() == [False, True]
        and trajectories.failed.tolist() == [False, False, True] + [False] * 3
    )
    assert trajectories.success.tolist() == [False] * 5 + [True] and trajectories.steps == 4
    assert trajectories.action[:, 0].tolist() == [1, 1, 0, 1, 1, 0]


def test_the_last_reward_is_paid_with_the_last_kept_action():
    """So the return is the recorded one; an episode of one action keeps none."""
    rewarded = logged(False, **{"next.reward": np.arange(1.0, 7.0)})
    assert Trajectories.from_demonstrations(rewarded).reward.tolist() == [1, 5, 0, 4, 11, 0]
    single = replace(rewarded, episode=np.array([0, 0, 0, 0, 0, 1]))
    assert Trajectories.from_demonstrations(single).reward.tolist() == [1, 2, 3, 9, 0, 0]
    with pytest.raises(UserError, match="2 of 2 episodes have no rewards recorded"):
        Trajectories.from_demonstrations(logged(False)).recorded_rewards()
