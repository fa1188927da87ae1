"""Refilling is fair: the gradient of a task does not depend on its length and its difficulty."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.base import NumpyEnv
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.groups import GroupConfig, GroupSource
from vla_rl.experience.rollout import SeedStream

EASY, HARD = (0.5, 1), (0.1, 8)  # probability of success, decisions in an episode


class CoinEnv(NumpyEnv):
    """Success is drawn by the first action; even seeds are easy and short, odd ones hard and long."""

    def __init__(self, num_envs: int) -> None:
        entry = ArraySpec((1,), "float32", 0.0, 1.0)
        spec = EnvSpec("coin", {}, entry, entry, ("toss",), 0.1, 8, 1)
        super().__init__(spec, num_envs, {"won": np.zeros(num_envs, bool)})

    def _begin(self, row, seed):
        self._task_state["won"][row] = False

    def _advance(self, env_ids, action):
        hard = self._seed[env_ids] % 2 == 1
        first = self._time[env_ids] == 1
        chance, length = np.where(hard, HARD[0], EASY[0]), np.where(hard, HARD[1], EASY[1])
        self._task_state["won"][env_ids] |= first & (action[:, 0] < chance)
        over, won = self._time[env_ids] >= length, self._task_state["won"][env_ids]
        return (over & won).astype(np.float32), over & won, over & ~won

    def _state(self):
        return (self._seed[:, None] % 2).astype(np.float32)


class Uniform:
    """Draws from [0, 1)."""

    version = 0
    encode = staticmethod(lambda obs: {"state": torch.as_tensor(obs.state)})
    initial_state = staticmethod(lambda env_ids: {})
    reset_state = staticmethod(lambda state, env_ids: state)

    def act(self, features, state, mode, generator):
        sample = torch.rand(len(features["state"]), 1, 1, generator=generator)
        return ActionOut(sample, sample, torch.zeros(len(sample))), state


def contributions(rollouts) -> dict[bool, tuple[float, float]]:
    """Mean and its standard error, easy (False) and hard, of what each **launched** group adds to the gradient of its
    task's probability, which is 1: leave-one-out advantages times the score of a Bernoulli."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for rollout in rollouts:
        won = rollout.reward.sum((0, 2)).reshape(-1, 4).double()
        for group, seed in zip(won, rollout.seeds[0, ::4].tolist(), strict=True):
            p = (HARD if seed % 2 else EASY)[0]
            advantage = (group - group.mean()) * 4 / 3
            found[bool(seed % 2)].append(float((advantage * (group - p) / (p * (1 - p))).mean()))
    launched = sum(rollout.info["rollout/groups_played"] for rollout in rollouts) / 2
    total = {hard: (sum(items), sum(item**2 for item in items)) for hard, items in found.items()}
    error = {hard: (b / launched - (a / launched) ** 2) ** 0.5 / launched**0.5 for hard, (a, b) in total.items()}
    return {hard: (a / launched, error[hard]) for hard, (a, _) in total.items()}


def collect(kind: type[GroupSource], ahead: int) -> list[Rollout]:
    config = GroupConfig(groups=6, size=4, ahead=ahead, limit=1000)
    maker = kind(CoinEnv(24), Uniform(), config, SeedStream(0, 10**6), torch.Generator())
    return [maker.next() for _ in range(120)]


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.full), 5])
def test_refilling_weights_short_easy_and_long_hard_episodes_alike(ahead):
    rollouts = collect(GroupSource, ahead)
    refilled = sum(rollout.info["rollout/groups_refilled"] for rollout in rollouts)
    played = sum(rollout.info["rollout/groups_played"] for rollout in rollouts)
    uniform_share = sum(p**4 + (1 - p) ** 4 for p, _ in (EASY, HARD)) / 2
    assert refilled / played == pytest.approx(
        uniform_share, abs=4 * (uniform_share * (1 - uniform_share) / played) ** 0.5
    )
    for mean, error in contributions(rollouts).values():
        assert error < 0.1 and abs(mean - 1) < 4 * error


class Hasty(GroupSource):
    """What not to do: the first groups to end are delivered and the others dropped."""

    def deliver(self) -> Rollout:
        self._groups.sort(key=lambda group: max(member.stop for member in group.members))
        rollout, self._carried = super().deliver(), []
        return rollout


@pytest.mark.full
def test_delivering_the_first_groups_to_end_is_unfair():
    found = contributions(collect(Hasty, 5))
    assert found[False][0] > 1.5 * found[True][0] and found[True][0] < 1 - 4 * found[True][1]
