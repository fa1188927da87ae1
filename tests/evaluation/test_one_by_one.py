"""A policy that decides one by one: the decisions of each environment are those that it takes alone."""

from __future__ import annotations

import numpy as np
import pytest

from sims.catalog import make
from tests.auditing import PrivilegedEnv
from tests.visual_point_mass import VisualPointMass, tiny_vla
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import ActionOut
from vla_rl.evaluation.run import OneByOne, play
from vla_rl.experience.collect import ExpertPolicy, features_of, observation_of


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
    for num_envs in (1, 8):
        env = VisualPointMass(num_envs)
        found.append(outcomes(env, OneByOne(tiny_vla(env.spec), num_envs), range(20), noise_seed=3))
    assert found[0] == found[1]


def test_privileged_observations_reach_those_alone_who_may_read_them():
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


def test_chunks_of_different_lengths_are_refused():
    class Uneven(Stateful):
        def act(self, features, state, mode, generator):
            action = np.zeros((1, 1 + int(features["seed"][0]) % 2, 2), np.float32)
            return ActionOut(action, None, None), state

    with pytest.raises(ContractError, match=r"chunks of the shapes \[\(1, 2\), \(2, 2\)\] at the same time"):
        outcomes(make("counting", num_envs=2), OneByOne(Uneven(), 2), [100, 101])


def test_features_of_an_observation_are_the_observation():
    obs = PrivilegedEnv(3).reset(np.arange(3), np.arange(3))
    back = observation_of(features_of(obs))
    for name in ("state", "task", "time"):
        assert np.array_equal(getattr(back, name), getattr(obs, name))
    assert back.images.keys() == obs.images.keys() and back.extras.keys() == obs.extras.keys()
