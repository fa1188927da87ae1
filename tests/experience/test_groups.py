"""Groups: the counting environment through ``GroupSource``, what is refilled, carried over, saved and refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
import torch

from sims.base import NumpyEnv
from sims.catalog import make
from sims.toy.counting import CountingEnv, episode_length, expected_reward
from tests.auditing import STEPS, AuditingPolicy, PrivilegedEnv
from tests.experience.makers import LuckyEnv, NanPolicy, Patient, equal_rollouts, luck
from tests.toys import Stateless
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.groups import GroupConfig, GroupSource
from vla_rl.experience.rollout import SeedStream
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.training.checkpoint import latest_state, save_state

START = 300
SMALL = GroupConfig(groups=3, size=4, ahead=2, limit=40)


def mixed(seed: int, size: int = SMALL.size) -> bool:
    return len({luck(seed, member, size) for member in range(size)}) > 1


def source(config=SMALL, num_envs=7, horizon=4, policy=None, env=None, seeds=None):
    env = env or LuckyEnv(num_envs, config.size)
    seeds = seeds or SeedStream(START, START + 100_000)
    return config.build(env, policy or AuditingPolicy(horizon), seeds, torch.Generator())


def seeds_of(rollout: Rollout, size: int = SMALL.size) -> list[int]:
    """The groups' seeds; every group must be ``size`` neighbours."""
    groups = rollout.seeds[0].reshape(-1, size)
    assert (groups == groups[:, :1]).all() and (rollout.seeds == rollout.seeds[:1]).all()
    return groups[:, 0].tolist()


def audit(rollout: Rollout, horizon: int, size: int) -> None:
    """Recompute every number of every column from the rules of the counting environment alone."""
    seeds, t = rollout.seeds[0].numpy(), horizon * np.arange(len(rollout.reward))[:, None]
    length, even = episode_length(seeds), seeds % 2 == 0
    before, after = np.minimum(t, length), np.minimum(t + horizon, length)
    number = t[..., None] + np.arange(1, horizon + 1)  # [T,1,H]
    valid, ends = number <= length[:, None], (before < length) & (after == length)
    extra = np.array([luck(seed, e % size, size) for e, seed in enumerate(seeds.tolist())])
    reward = np.where(valid, expected_reward(number), 0) + (number == length[:, None]) * extra[:, None]
    assert np.array_equal(rollout.valid, valid) and np.array_equal(rollout.reward, reward)
    for name, wanted in (("terminated", ends & even), ("success", ends & even), ("truncated", ends & ~even)):
        assert np.array_equal(getattr(rollout, name), wanted), name
    counters, acted = np.stack([np.broadcast_to(seeds, before.shape), before], -1), valid.any(-1)
    assert np.array_equal(rollout.features["counters"][:-1][acted], counters[acted])
    assert np.array_equal(rollout.sample[..., 0][acted], np.broadcast_to(number, valid.shape)[acted])
    assert np.array_equal(rollout.logprob[acted], -before[acted])
    last = np.where(even, (length - 1) // horizon * horizon, length)
    assert np.array_equal(rollout.features["counters"][-1], np.stack([seeds, last], 1))
    e, at = (ends & ~even).T.nonzero()
    assert np.array_equal(rollout.final_index, np.stack([at, e], 1))
    assert np.array_equal(rollout.final_features["counters"], np.stack([seeds[e], length[e]], 1))


# -- nothing lost, doubled or reordered -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "horizon", "ahead"), [(3, 4, 2), (7, 1, 0), (12, 8, 2)])
def test_groups_are_recomputed_and_come_in_the_order_of_launch(num_envs, horizon, ahead):
    maker = source(replace(SMALL, ahead=ahead), num_envs, horizon)
    rollouts = [maker.next() for _ in range(4)]
    for rollout in rollouts:
        audit(rollout, horizon, SMALL.size)
    delivered = [seed for rollout in rollouts for seed in seeds_of(rollout)]
    assert delivered == list(islice(filter(mixed, count(START)), 4 * SMALL.groups))
    assert all(times == SMALL.size for times in maker.env.started.values())  # no seed was tried again
    assert sum(rollout.info["rollout/groups_refilled"] for rollout in rollouts) > 3


def test_counters_are_of_all_groups_played_replaced_and_carried():
    maker, carried, started = source(), 0, START
    for _ in range(5):
        rollout = maker.next()
        info, played = rollout.info, range(started, started + int(rollout.info["rollout/groups_played"]))
        lengths = episode_length(np.array(played))
        assert info["env/steps"] == SMALL.size * lengths.sum() and info["rollout/episodes"] == SMALL.size * len(played)
        assert info["rollout/successes"] == SMALL.size * sum(seed % 2 == 0 for seed in played)
        assert info["rollout/truncations"] == info["rollout/episodes"] - info["rollout/successes"]
        assert (
            info["rollout/groups_refilled"] == sum(not mixed(seed) for seed in played)
            and info["rollout/groups_uniform"] == 0
        )
        assert info["rollout/groups_old"] == carried
        carried = info["rollout/groups_carried"]
        assert info["rollout/groups_old"] + len(played) == SMALL.groups + info["rollout/groups_refilled"] + carried
        assert all(info[name] > 0 for name in ("time/env_s", "time/encode_s", "time/act_s"))
        started = played.stop
    assert maker.seeds.drawn == started - START == sum(maker.env.started.values()) / SMALL.size


def test_no_environment_idles_while_episodes_are_wanted():
    maker = source(GroupConfig(groups=9, size=4, ahead=0, limit=9), num_envs=8)
    maker.next()
    launched = [moving for started, moving in maker.env.acting if started < 36]
    assert len(launched) > 10 and all(moving == 8 for moving in launched)


@pytest.mark.parametrize("ahead", [0, 2])
def test_carried_groups_are_few_and_one_rollout_old(ahead):
    maker, most = source(replace(SMALL, ahead=ahead), num_envs=SMALL.size * (SMALL.groups + ahead)), 0
    for version in range(10):
        maker.policy.version = version
        rollout = maker.next()
        versions = rollout.version[0].reshape(-1, SMALL.size)
        assert (rollout.version == rollout.version[:1]).all() and (versions == versions[:, :1]).all()
        assert (versions >= version - 1).all() and versions.max() == version
        assert (versions[:, 0] < version).sum() == rollout.info["rollout/groups_old"] <= ahead
        assert rollout.info["rollout/groups_carried"] <= ahead
        most = max(most, rollout.info["rollout/groups_carried"])
    assert most == ahead


# -- which groups are kept --------------------------------------------------------------------------------------------


def test_without_dynamic_sampling_every_group_is_delivered_once():
    maker = source(replace(SMALL, limit=SMALL.groups))
    for first in range(START, START + 12, 3):
        rollout = maker.next()
        assert seeds_of(rollout) == [first, first + 1, first + 2]
        audit(rollout, 4, SMALL.size)
        uniform = sum(not mixed(seed) for seed in range(first, first + 3))
        assert rollout.info["rollout/groups_uniform"] == uniform and rollout.info["rollout/groups_refilled"] == 0
        assert rollout.info["rollout/groups_carried"] == rollout.info["rollout/groups_old"] == 0


def test_at_the_limit_uniform_groups_fill_the_rollout():
    """In a plain counting environment every episode of a seed earns the same."""
    maker = source(replace(SMALL, limit=6), env=make("counting", num_envs=7))
    rollout = maker.next()
    assert seeds_of(rollout) == [START, START + 1, START + 2]
    names = ("played", "refilled", "uniform", "carried")
    assert [rollout.info[f"rollout/groups_{name}"] for name in names] == [6, 3, 3, 0]


def test_mixed_groups_come_with_the_first_uniform_ones():
    maker = source(GroupConfig(groups=4, size=4, ahead=3, limit=5), num_envs=4)
    rollout = maker.next()  # of 300 to 304 the last three are mixed
    assert [mixed(seed) for seed in range(300, 305)] == [False, False, True, True, True]
    assert seeds_of(rollout) == [300, 302, 303, 304]
    names = ("played", "refilled", "uniform", "carried")
    assert [rollout.info[f"rollout/groups_{name}"] for name in names] == [5, 1, 1, 0]


@pytest.mark.parametrize("winners", [1, 15])
def test_one_that_differs_among_many_is_enough(winners):
    """A filter on mean success, .1 to .9, would throw these away: half of the gradient where success is rare."""

    class Rare(LuckyEnv):
        def _advance(self, env_ids, action):
            _, success, late = CountingEnv._advance(self, env_ids, action)
            return (self.member[env_ids] < winners) * (success | late).astype(np.float32), success, late

    maker = source(GroupConfig(groups=2, size=16, ahead=0, limit=9), env=Rare(8, 16))
    rollout = maker.next()
    assert seeds_of(rollout, 16) == [START, START + 1] and rollout.reward.sum() == 2 * winners
    assert rollout.info["rollout/groups_played"] == 2 and rollout.info["rollout/groups_uniform"] == 0


# -- boundaries -------------------------------------------------------------------------------------------------------


class Lasting(LuckyEnv):
    """Succeeds at the fifth step and runs on."""

    def __init__(self, num_envs: int, kind: str) -> None:
        super().__init__(num_envs)
        self.spec = replace(self.spec, success=kind)

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, success=step.obs.state[:, STEPS] >= 5)


@pytest.mark.parametrize("kind", ["once", "at_end"])
def test_an_episode_is_over_at_its_first_success(kind):
    maker = source(GroupConfig(groups=6, size=4, ahead=0, limit=6), env=Lasting(7, kind), policy=Patient(4))
    rollout = maker.next()
    length = torch.from_numpy(episode_length(rollout.seeds[0].numpy()))
    steps = torch.minimum(length, torch.tensor(8)) if kind == "once" else length
    assert torch.equal(rollout.valid.sum((0, 2)), steps) and rollout.info["env/steps"] == steps.sum()
    assert torch.equal(rollout.success.sum(0), (length >= 5).long())
    assert torch.equal((rollout.terminated | rollout.truncated).sum(0), torch.ones(24).long())
    assert (rollout.terminated | rollout.truncated)[rollout.success].all()
    assert rollout.info["rollout/successes"] == (length >= 5).sum()


def test_launched_environments_are_reset_in_the_policy_too():
    maker = source(replace(SMALL, limit=5), env=PrivilegedEnv(7))
    rollout = maker.next()
    assert len(maker.policy.resets) == 5 * SMALL.size and len(rollout.final_index) > 0
    assert all(names == {"force"} for names in maker.policy.extras)


def test_a_nan_is_refused_before_anything_moves():
    maker = source(policy=NanPolicy(4))
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"version 0.*environment 2.*nothing was executed"):
            maker.next()
        with pytest.raises(ContractError, match=r"7 decisions of an unfinished rollout would be lost"):
            maker.state_dict()
    maker.policy.mended = True
    whole = source()
    for _ in range(2):
        same(maker.next(), whole.next())


def same(one: Rollout, other: Rollout) -> None:
    counters = [{name: value for name, value in it.info.items() if not name.endswith("_s")} for it in (one, other)]
    assert equal_rollouts(one, other) and counters[0] == counters[1]


def gaussian_source(seed: int):
    """Random actions in the point mass: every group is mixed."""
    env = make("point_mass", num_envs=10)
    torch.manual_seed(3)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(4, width=16))
    return SMALL.build(env, policy, SeedStream(0, 10**6), torch.Generator().manual_seed(seed))


def test_a_saved_state_goes_on_with_the_same_rollouts(tmp_path):
    one, other = gaussian_source(1), gaussian_source(1)
    for _ in range(2):
        same(one.next(), other.next())
    save_state(tmp_path, 2, one.state_dict())
    _, state = latest_state(tmp_path)
    assert len(state["carried"]) == SMALL.ahead
    resumed = gaussian_source(2)
    resumed.load_state_dict(state)
    for _ in range(3):
        rollout = one.next()
        same(rollout, other.next())
        same(rollout, resumed.next())
    assert rollout.info["rollout/groups_old"] == SMALL.ahead


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 1}, "groups of 1 cannot be compared"),
        ({"ahead": 3}, "ahead 3, groups 3 and limit 40 contradict each other"),
        ({"ahead": -1}, "contradict each other"),
        ({"limit": 2}, "contradict each other"),
        ({"size": 2, "ahead": 0}, "7 environments are more than the 6 episodes that may run at once"),
        ({"size": 2, "limit": 3}, "7 environments are more than the 6 episodes"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        source(replace(SMALL, **changes))
    assert str(caught.value).count(". ") == 0


class Diverging(LuckyEnv):
    """What ends by its time limit ends because it diverged."""

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, cause=tuple({"time_limit": "diverged"}.get(cause, cause) for cause in step.cause))


def test_episodes_that_diverged_are_counted():
    info = source(env=Diverging(7)).next().info
    assert info["rollout/diverged"] == info["rollout/truncations"] > 0
    assert "rollout/diverged" not in source().next().info


# -- refilling is fair: the gradient of a task does not depend on its length and its difficulty ----------------------


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


class Uniform(Stateless):
    """Draws from [0, 1)."""

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


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.full), 20])
def test_refilling_weights_short_and_long_episodes_alike(ahead):
    config = GroupConfig(groups=24, size=4, ahead=ahead, limit=1000)
    maker = GroupSource(CoinEnv(96), Uniform(), config, SeedStream(0, 10**6), torch.Generator())
    rollouts = [maker.next() for _ in range(16)]
    refilled = sum(rollout.info["rollout/groups_refilled"] for rollout in rollouts)
    played = sum(rollout.info["rollout/groups_played"] for rollout in rollouts)
    uniform_share = sum(p**4 + (1 - p) ** 4 for p, _ in (EASY, HARD)) / 2
    assert refilled / played == pytest.approx(
        uniform_share, abs=4 * (uniform_share * (1 - uniform_share) / played) ** 0.5
    )
    for mean, error in contributions(rollouts).values():
        assert error < 0.1 and abs(mean - 1) < 4 * error
