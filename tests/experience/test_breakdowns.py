"""Episodes whose simulator broke down: what was not executed teaches nothing, and nothing is joined or lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.toy.counting import episode_length
from tests.breaking import BreakingEnv
from tests.experience.makers import LuckyEnv, Patient
from tests.experience.replays import line
from vla_rl.contract.batch import Rollout
from vla_rl.experience.collect import ExpertPolicy, collect_demonstrations, collect_trajectories
from vla_rl.experience.driver import ATTEMPTS
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream

LONG = [seed for seed in range(400) if episode_length(np.array(seed)) > 16]
HORIZON, SEED = 4, LONG[0]


class Stream(SeedStream):
    """These seeds."""

    def __init__(self, seeds):
        super().__init__(0, len(seeds))
        self.chosen = seeds

    def __next__(self):
        return self.chosen[super().__next__()]


def window(deaths, seeds, decisions=6, num_envs=1, at=1) -> Rollout:
    env = BreakingEnv(num_envs, deaths, at)
    return RolloutSource(env, Patient(HORIZON), decisions, Stream(seeds), torch.Generator()).next()


def test_a_window_ends_with_a_decision_that_was_not_executed():
    found = window({LONG[0]: 1}, LONG[:5])
    assert found.seeds[:, 0].tolist() == [LONG[0]] * 2 + [LONG[1]] * 4
    assert found.valid.any(-1)[:, 0].tolist() == [True, False, True, True, True, True]
    assert found.truncated[:, 0].tolist() == [False, True, False, False, False, False]
    assert not found.terminated.any() and not found.reward[1].any()
    assert found.final_index.tolist() == [[1, 0]]
    assert found.final_features["counters"].tolist() == [[LONG[0], HORIZON]]
    assert found.features["counters"][1].tolist() == [[LONG[0], HORIZON]]
    assert found.info["rollout/episodes"] == 0 and found.info["rollout/truncated_by_worker"] == 1
    assert "rollout/truncated_by_worker" not in window({}, LONG[:5]).info


def test_replay_bootstraps_after_the_last_executed_decision():
    """The next episode has the same seed, so nothing but the end separates the two."""
    replay = Replay(40, 1.0, 3)
    added = replay.add(window({SEED: 1}, [SEED] * 9, at=2, decisions=5))
    assert added == 4
    found = replay.transitions(replay.decisions())
    at = [list(item) for item in found.features["counters"].tolist()]
    assert at == [[SEED, 0], [SEED, HORIZON]] * 2
    assert found.next_features["counters"].tolist() == [[SEED, 2 * HORIZON]] * 4
    assert (found.returns == -np.inf).all() and (found.discount == 1).all()
    earned = [sum(range(1, 2 * HORIZON + 1)), sum(range(HORIZON + 1, 2 * HORIZON + 1))]
    assert found.reward.tolist() == [*earned, *earned]


def test_replay_ends_what_broke_down_before_a_windows_decisions():
    env = BreakingEnv(1, {SEED: 1}, at=2)
    source = RolloutSource(env, Patient(HORIZON), 2, Stream([SEED] * 9), torch.Generator())
    replay = Replay(40, 1.0, 3)
    added = [replay.add(source.next()) for _ in range(3)]
    assert added == [2, 1, 2] and env.broken == [SEED]
    found = replay.transitions(replay.decisions())
    pairs = zip(found.features["counters"][:, 1].tolist(), found.next_features["counters"][:, 1].tolist(), strict=True)
    two, three = 2 * HORIZON, 3 * HORIZON
    assert sorted(pairs) == [(0, two), (0, three), (HORIZON, two), (HORIZON, three), (two, three)]


def test_an_end_that_idle_decisions_repeat_is_one_end():
    """Groups idle after their end; the decision before the flag has ended already."""
    valid = torch.tensor([True, True, False, False])[:, None, None]
    over = torch.tensor([False, True, True, True])[:, None]
    replay = Replay(20, 1.0)
    replay.add(line([1.0] * 4, valid=valid, terminated=over))
    found = replay.transitions(replay.decisions())
    assert found.returns.tolist() == [2.0, 1.0] and found.discount.tolist() == [1.0, 0.0]


class BreakingGroups(LuckyEnv, BreakingEnv):
    """Members that earn different returns."""


def groups(deaths):
    env = BreakingGroups(5, 4, deaths)
    config = GroupConfig(groups=3, size=4, ahead=1, limit=12, num_envs=5)
    source = config.build(env, Patient(HORIZON), Stream(LONG), torch.Generator())
    return source.next(), env


def test_a_member_whose_simulator_broke_down_is_played_again():
    found, env = groups({LONG[0]: 2, LONG[1]: ATTEMPTS - 1})
    assert ATTEMPTS + 1 <= len(env.broken) == found.info["rollout/truncated_by_worker"]
    assert LONG[1] in found.seeds[0], "members that all broke down are no uniform group"
    for column in range(found.seeds.shape[1]):
        active = found.valid[:, column].any(-1)
        length = int(episode_length(found.seeds[0, column].numpy()))
        assert int(found.valid[:, column].sum()) == length, "the whole episode and nothing of the one that was lost"
        assert found.features["counters"][:-1][active, column, 1].tolist() == list(range(0, length, HORIZON))
        ends = found.terminated[:, column] | found.truncated[:, column]
        assert ends.nonzero().flatten().tolist() == [int(active.sum()) - 1]


def test_a_member_that_always_breaks_down_stays_truncated():
    found, env = groups({LONG[0]: 9 * ATTEMPTS})
    assert len(env.broken) == 4 * ATTEMPTS
    lost = found.seeds[0] == LONG[0]
    assert not lost.any() or found.truncated[:, lost].any(0).all()


def expert(obs):
    number = obs.time[:, None] + 1
    return np.stack([number, obs.state[:, :1]], -1).astype(np.float32)


def test_recorded_episodes_are_played_again():
    seeds = [seed for seed in LONG if seed % 2 == 0][:5]
    for deaths in ({}, {seeds[0]: 2, seeds[3]: 1}):
        demonstrations = collect_demonstrations(BreakingEnv(2, deaths), expert, seeds)
        assert sorted(np.unique(demonstrations.seed).tolist()) == seeds
        recorded = collect_trajectories(BreakingEnv(2, deaths, at=0), ExpertPolicy(expert), seeds, None)
        assert sorted(np.unique(recorded.seed).tolist()) == seeds
        lengths = {seed: int((recorded.seed == seed).sum()) - 1 for seed in seeds}
        assert lengths == {seed: int(episode_length(np.array(seed))) for seed in seeds}


def test_a_seed_that_always_breaks_down_is_left_out():
    seeds = [seed for seed in LONG if seed % 2 == 0][:3]
    with pytest.warns(UserWarning, match=rf"broke down {ATTEMPTS} times while seed {seeds[1]} was played"):
        recorded = collect_demonstrations(BreakingEnv(2, {seeds[1]: 99}), expert, seeds)
    assert sorted(np.unique(recorded.seed).tolist()) == [seeds[0], seeds[2]]
