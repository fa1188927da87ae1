"""Evaluation plays every seed exactly once and reports its outcome, for any number of environments, or one by one."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from tests.auditing import PrivilegedEnv
from tests.breaking import BreakingEnv
from tests.visual_point_mass import VisualPointMass, tiny_vla
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut
from vla_rl.evaluation.run import ATTEMPTS, OneByOne, Outcomes, evaluate, play
from vla_rl.evaluation.stats import MeanReturn
from vla_rl.experience.collect import ExpertPolicy, collect_demonstrations
from vla_rl.policies.feed_forward import GaussianPolicy

SEEDS = [*range(100, 111), 7]


class Auditor:
    """Acts in chunks of ``horizon`` and records its observations and which environments were reset."""

    version = 0

    def __init__(self, num_envs: int, horizon: int = 4) -> None:
        self.num_envs, self.horizon = num_envs, horizon
        self.first_seeds: list[int] = []
        self.resets: list[int] = []
        self.observed: list[object] = []

    def encode(self, obs):
        self.observed.append(obs)
        self.first_seeds += obs.state[obs.time == 0, 0].astype(int).tolist()
        return {"state": obs.state}

    def initial_state(self, env_ids):
        return {}

    def reset_state(self, state, env_ids):
        self.resets += list(env_ids)
        return state

    def act(self, features, state, mode, generator):
        assert mode == "eval"
        action = np.ones((self.num_envs, self.horizon, 2), np.float32)
        return ActionOut(action, action, np.zeros(self.num_envs)), state


@pytest.mark.parametrize(("num_envs", "horizon"), [(1, 1), (3, 4), (5, 8), (16, 4)])
def test_every_seed_is_played_once_and_reported_correctly(num_envs, horizon):
    policy, reports = Auditor(num_envs, horizon), []
    found = evaluate(
        make("counting", num_envs=num_envs), policy, SEEDS, report=lambda *observed: reports.append(observed)
    )
    even = np.array(SEEDS) % 2 == 0
    assert found.seeds.tolist() == SEEDS
    assert np.array_equal(found.length, episode_length(np.array(SEEDS)))
    assert np.array_equal(found.success, even)
    assert np.array_equal(found.returns, [expected_reward(np.arange(1, n + 1)).sum() for n in found.length])
    assert found.cause == tuple("success" if flag else "time_limit" for flag in even)
    assert reports[-1] == (len(SEEDS), even.sum()) and reports == sorted(reports)
    spare = [SEEDS[0]] * max(0, num_envs - len(SEEDS))  # environments without a seed of their own
    assert sorted(policy.first_seeds) == sorted(SEEDS + spare)
    assert len(policy.resets) == len(SEEDS) + len(spare)


def test_the_view_is_what_the_policy_sees():
    policy = Auditor(2)
    blank = lambda obs: replace(obs, images={name: image * 0 for name, image in obs.images.items()})  # noqa: E731
    evaluate(make("counting", num_envs=2), policy, [100, 101, 102], view=blank)
    assert len(policy.observed) > 5 and not any(obs.images["audit"].any() for obs in policy.observed)


def test_nothing_privileged_reaches_the_policy():
    env = make("lift", num_envs=2, render=False)
    policy = Auditor(2, 20)
    policy.act = lambda *args: (ActionOut(np.zeros((2, 20, 4), np.float32), None, None), {})
    found = evaluate(env, policy, [1, 2])
    assert set(found.cause) == {"time_limit"} and found.length.tolist() == [60, 60]
    assert policy.observed and not any(obs.extras for obs in policy.observed)


class Still(Auditor):
    """Sends zeros."""

    def act(self, features, state, mode, generator):
        action = np.zeros((self.num_envs, self.horizon, 1), np.float32)
        return ActionOut(action, action, np.zeros(self.num_envs)), state


def test_without_success_the_score_is_the_mean_return():
    """Gymnasium's tasks have no success, so 0 % would be meaningless."""
    env = make("gym", num_envs=2, id="Pendulum-v1", time_limit=6)
    reports = []
    found = evaluate(env, Still(2, 3), [1, 2, 3], report=lambda *counts: reports.append(counts))
    assert reports == [(1, None), (2, None), (3, None)]
    assert found.score == MeanReturn.of(found.returns) and found.score.mean < 0
    counted = evaluate(make("counting", num_envs=2), Auditor(2), [1, 2, 3])
    assert counted.score == counted.rate


def test_an_outcome_depends_on_no_environment_or_order():
    """The flow policy draws noise in mode "eval"; success, causes and lengths are compared without a tolerance."""
    seeds, found = list(range(10)), {}
    for num_envs in (1, 3):
        env = VisualPointMass(num_envs)
        found[num_envs] = evaluate(env, tiny_vla(env.spec), seeds, noise_seed=5)
    reverse = evaluate(VisualPointMass(3), tiny_vla(env.spec), seeds[::-1], noise_seed=5)
    part = evaluate(VisualPointMass(7), tiny_vla(env.spec), seeds[4:9], noise_seed=5)
    assert 0 < found[1].success.sum() < len(seeds)
    assert np.array_equal(found[1].success, found[3].success) and found[1].cause == found[3].cause
    assert np.array_equal(found[1].length, found[3].length)
    np.testing.assert_allclose(found[1].returns, found[3].returns, rtol=1e-4)
    assert np.array_equal(reverse.success[::-1], found[3].success)
    assert np.array_equal(part.success, found[3].success[4:9])


def test_a_policy_with_one_generator_is_found_by_the_check():
    class OneGenerator(GaussianPolicy):
        def act(self, features, state, mode, generator):
            torch.rand(2, generator=generator)
            return super().act(features, state, mode, generator)

    env = make("point_mass", num_envs=2)
    with pytest.raises(ContractError, match="with a list of generators, one per environment"):
        check_policy(OneGenerator(env.spec), env, torch.Generator())


def test_an_expert_is_evaluated_as_it_is_recorded():
    """It reads what is privileged; the successes of its evaluation are those of its recording."""
    seeds, wanted = list(range(300, 312)), []

    def expert(obs):
        wanted.extend(name for name in obs.extras)
        return np.stack([obs.time + 1, obs.extras["privileged/seed"][:, 0]], -1)[:, None].astype(np.float32)

    outcomes = evaluate(PrivilegedEnv(5), ExpertPolicy(expert), seeds)
    recorded = collect_demonstrations(PrivilegedEnv(4), expert, seeds)
    assert set(wanted) == {"privileged/seed", "force"} and outcomes.success.mean() == 0.5
    assert [seed for seed, won in zip(seeds, outcomes.success, strict=True) if won] == list(
        dict.fromkeys(recorded.seed)
    )
    assert np.array_equal(outcomes.length, episode_length(np.array(seeds)))
    assert np.array_equal(recorded.action[:, 1], recorded.seed)


def test_an_expert_in_chunks_may_execute_only_their_first_actions():
    def expert(obs):
        number = obs.time[:, None] + 1 + np.arange(4)
        return np.stack([number, np.repeat(obs.state[:, :1], 4, 1)], -1).astype(np.float32)

    for horizon in (None, 1, 3):
        outcomes = evaluate(make("counting", num_envs=3), ExpertPolicy(expert, horizon), SEEDS)
        assert np.array_equal(outcomes.length, episode_length(np.array(SEEDS)))
        out, _ = ExpertPolicy(expert, horizon).act(
            ExpertPolicy(expert).encode(make("counting", num_envs=2).reset([0, 1], [3, 4])), {}, "eval", None
        )
        assert out.action.shape == (2, horizon or 4, 2)


@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_an_episode_whose_simulator_broke_down_is_played_again(num_envs):
    env = BreakingEnv(num_envs, {100: 2, 103: ATTEMPTS - 1, 110: 1})
    found = evaluate(env, Auditor(num_envs, 2), SEEDS)
    sound = evaluate(make("counting", num_envs=num_envs), Auditor(num_envs, 2), SEEDS)
    assert max(env.deaths.values()) <= 0
    for name in ("seeds", "success", "cause", "length", "family", "returns"):
        assert np.array_equal(getattr(found, name), getattr(sound, name)), name


@pytest.mark.filterwarnings("ignore:worker process:UserWarning")
def test_killed_simulator_processes_change_no_outcome(monkeypatch):
    """SIGKILL to one of two processes at every fifth decision, four times."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    env, decisions = make("isolated", num_envs=4, env="counting", workers=2), 0

    def kill(decision):
        nonlocal decisions
        decisions += 1
        if decisions % 5 == 0 and env.restarts < 4:
            os.kill(env.workers[decisions // 5 % 2].link.pid, signal.SIGKILL)

    with closing(env):
        found = evaluate(env, Auditor(4, 2), SEEDS, watch=kill)
        assert env.restarts == 4 and env.truncated_by_worker > 0
    sound = evaluate(make("counting", num_envs=4), Auditor(4, 2), SEEDS)
    for name in ("seeds", "success", "cause", "length", "family", "returns"):
        assert np.array_equal(getattr(found, name), getattr(sound, name)), name


def test_a_seed_that_always_breaks_its_simulator_is_named():
    with pytest.raises(UserError, match=rf"broke down {ATTEMPTS} times while seed 103 was played"):
        evaluate(BreakingEnv(3, {103: ATTEMPTS + 9}), Auditor(3, 2), SEEDS)


@pytest.mark.parametrize(
    ("length", "cause", "limit", "said"),
    [
        (1, "success", 9, "after their first action"),
        (1, "success", 1, ""),
        (3, "success", 9, ""),
        (3, "diverged", 9, "was not finite"),
    ],
)
def test_what_can_hardly_be_meant_is_remarked(length, cause, limit, said):
    won, two = np.full(2, cause == "success"), np.full(2, length)
    outcomes = Outcomes(np.arange(2), won, (cause,) * 2, two, ("",) * 2, won.astype(float))
    found = outcomes.remarks(limit)
    assert [said in remark and remark.startswith("2 of 2") for remark in found] == ([True] if said else [])


# -- one by one: decisions of each environment are those that it takes alone -------------------------------------------


class Stateful:
    """Counts its decisions since the reset, of one environment at a time."""

    version = 0

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.contexts = 0

    def encode(self, obs):
        self.batches.append(len(obs.time))
        return {"time": obs.time, "seed": obs.state[:, 0]}

    def context(self, features, state, generator):
        self.contexts += 1
        return {**features, "count": state["count"]}, state

    def initial_state(self, num_envs):
        return {"count": np.zeros(num_envs, np.int64)}

    def reset_state(self, state, env_ids):
        count = state["count"].copy()
        count[env_ids] = 0
        return {"count": count}

    def act(self, features, state, mode, generator):
        assert mode == "eval" and len(generator) == 1 and features["count"] * 4 == features["time"]
        action = np.stack([np.full((1, 4), features["count"][0]), np.full((1, 4), features["seed"][0])], -1)
        return ActionOut(action.astype(np.float32), None, None), {"count": state["count"] + 1}


def outcomes(env, policy, seeds, **given):
    found = play(env, policy, seeds, announce=policy.announce, **given)
    return sorted((one.seed, one.success, one.length, one.returns) for one in found)


def test_batches_are_of_one_and_each_environment_has_its_state():
    inner = Stateful()
    policy = OneByOne(inner, 5)
    decisions: dict[int, int] = {}
    for episode in play(make("counting", num_envs=5), policy, range(100, 112), announce=policy.announce):
        seconds = policy.seconds(episode.env_id)
        decisions[episode.seed] = len(seconds)
        assert len(seconds) == -(-episode.length // 4) and min(seconds) > 0
    assert sorted(decisions) == list(range(100, 112))
    # Environments without a seed cost nothing: as many decisions as the episodes have.
    assert inner.batches == [1] * sum(decisions.values()) and inner.contexts == len(inner.batches)


def test_an_outcome_is_the_same_to_the_last_bit_beside_any_others():
    found = []
    for num_envs in (1, 5):
        env = VisualPointMass(num_envs)
        found.append(outcomes(env, OneByOne(tiny_vla(env.spec), num_envs), range(8), noise_seed=3))
    assert found[0] == found[1]


def test_privileged_observations_reach_who_may_read_them():
    seen: list[set[str]] = []

    def expert(obs):
        seen.append(set(obs.extras))
        return np.zeros((len(obs.time), 1, 2), np.float32)

    outcomes(PrivilegedEnv(2), OneByOne(ExpertPolicy(expert), 2), [1, 2])
    assert seen and all(names == {"privileged/seed", "force"} for names in seen)

    class Blind(Stateful):
        def encode(self, obs):
            assert set(obs.extras) == {"force"}
            return super().encode(obs)

    outcomes(PrivilegedEnv(2), OneByOne(Blind(), 2), [1, 2])
