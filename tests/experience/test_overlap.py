"""Two halves of the environments take turns: the rollouts of the plain source, with simulation beside inference."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import episode_length
from tests.auditing import AuditingPolicy
from tests.halves import Split
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.overlap import OverlappedSource
from vla_rl.experience.rollout import RolloutSource, SeedStream, WindowConfig
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy

CASES = [(5, 4, 9), (2, 8, 7), (6, 1, 12)]  # (environments, horizon, decisions)
START = 300
ROOT = str(Path(__file__).resolve().parents[2])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def overlapped(num_envs=5, horizon=4, decisions=9, policy=None, env=None):
    return OverlappedSource(
        env or Split(num_envs), policy or AuditingPolicy(horizon), decisions, SeedStream(START, 10**6), seeded()
    )


def plain(num_envs=5, horizon=4, decisions=9):
    return RolloutSource(
        make("counting", num_envs=num_envs), AuditingPolicy(horizon), decisions, SeedStream(START, 10**6), seeded()
    )


def assert_same(one: Rollout, other: Rollout, but: tuple[str, ...] = ("info", "aux", "spans")) -> None:
    """Equal in everything ``but``; the truncated ones may be listed in another order."""
    for field in fields(Rollout):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in but:
            continue
        if field.name == "final_features":
            for name in a:
                assert torch.equal(a[name][listed(one)], b[name][listed(other)]), name
        elif field.name == "final_index":
            assert torch.equal(a[listed(one)], b[listed(other)])
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        elif isinstance(a, dict):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), field.name
        else:
            assert a == b, field.name


def listed(rollout: Rollout) -> torch.Tensor:
    return torch.argsort(rollout.final_index[:, 0] * 1000 + rollout.final_index[:, 1])


@pytest.mark.parametrize(("num_envs", "horizon", "decisions"), CASES)
def test_nothing_is_lost_doubled_or_reordered(num_envs, horizon, decisions):
    """Rows, seeds, episodes, ends and features are those of the source that is proven to keep them."""
    halves, whole = overlapped(num_envs, horizon, decisions), plain(num_envs, horizon, decisions)
    rollouts = [(halves.next(), whole.next()) for _ in range(4)]
    for one, other in rollouts:
        assert_same(one, other)
        first = num_envs // 2
        rows = [*range(first), *range(num_envs - first)]
        assert one.aux["row"].tolist() == [rows] * decisions, "each half has a state of its own"
        counters = [name for name in other.info if not name.endswith("_s")]
        assert {name: one.info[name] for name in counters} == {name: other.info[name] for name in counters}
        assert one.info.keys() == other.info.keys()
    assert sum(len(one.final_index) for one, _ in rollouts) > 2
    for (one, _), (after, _) in pairwise(rollouts):
        assert all(torch.equal(one.features[name][-1], after.features[name][0]) for name in one.features)


def test_one_half_simulates_whenever_the_policy_decides_for_the_other():
    env, log = Split(4), []
    env.log = log
    for part in env.parts:
        part.log = log

    class Deciding(AuditingPolicy):
        def act(self, *given):
            log.append("decide")
            return super().act(*given)

    overlapped(policy=Deciding(4), decisions=3, env=env).next()
    one, other = ["decide", "begin first"], ["decide", "begin second"]
    turns = [*one, *other]
    turns += 2 * ["wait first", *one, "wait second", *other]
    assert log == [*turns, "wait first", "wait second"]


def test_features_exist_once():
    rollout = overlapped().next()
    assert all(item.is_contiguous() and item.shape[:2] == (10, 5) for item in rollout.features.values())
    sizes = {item.untyped_storage().nbytes() == item.nbytes for item in rollout.features.values()}
    assert sizes == {True}


def gaussian(num_envs: int = 6) -> tuple[Split, GaussianPolicy]:
    torch.manual_seed(0)
    env = Split(num_envs, "point_mass")
    return env, GaussianPolicy(env.spec, config=GaussianConfig(horizon=1))


def noisy(seed: int = 0) -> OverlappedSource:
    env, policy = gaussian()
    return OverlappedSource(env, policy, 12, SeedStream(START, START + 1000), seeded(seed))


def test_equal_seeds_give_equal_rollouts_and_a_resumed_run_goes_on_in_mid_episode():
    one, other = noisy(), noisy()
    assert_same(one.next(), other.next(), but=("info", "spans"))
    resumed = noisy(seed=5)
    resumed.load_state_dict(one.state_dict())
    for _ in range(2):
        assert_same(resumed.next(), other.next(), but=("info", "spans"))


def test_a_sampled_action_has_the_log_prob_of_its_own_features():
    source = noisy()
    rollout, policy = source.next(), source.policy
    flat = {name: item[:-1].flatten(0, 1) for name, item in rollout.features.items()}
    recomputed = policy.log_prob(flat, rollout.sample.flatten(0, 1), {}).logprob.view_as(rollout.logprob)
    assert torch.allclose(recomputed, rollout.logprob, atol=1e-5) and rollout.sample.std() > 0.1
    assert not torch.equal(rollout.sample[:, :3], rollout.sample[:, 3:]), "each half draws noise of its own"


class Failing(AuditingPolicy):
    """Chooses a NaN at its eighth decision of a half, unless mended."""

    calls, mended = 0, False

    def act(self, features, state, mode, generator):
        out, after = super().act(features, state, mode, generator)
        self.calls += 1
        if self.calls >= 8 and not self.mended:
            out.action[0, 0, 1] = float("nan")
        return out, after


def test_a_nan_is_refused_and_what_the_other_half_has_begun_is_kept():
    source, whole = overlapped(policy=Failing(4)), plain()
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="nothing was executed"):
            source.next()
        with pytest.raises(ContractError, match="unfinished window would be lost"):
            source.state_dict()
    source.policy.mended = True
    for _ in range(2):
        assert_same(source.next(), whole.next())


def test_a_decision_of_a_window_that_has_only_begun_is_not_lost_in_silence():
    source = overlapped(policy=Failing(4), decisions=7)
    source.policy.calls = 6  # the second half's first decision is refused
    with pytest.raises(NonFiniteError):
        source.next()
    with pytest.raises(ContractError, match="1 decisions of an unfinished window"):
        source.state_dict()


def test_both_halves_act_with_the_policy_that_was_published():
    source = overlapped()
    for version in (0, 3):
        source.policy = AuditingPolicy(4) if version == 0 else source.policy
        source.policy.version = version
        assert (source.next().version == version).all()
    env, policy = gaussian()
    source = OverlappedSource(env, policy, 2, SeedStream(0, 9), seeded())
    source.policy = other = gaussian()[1]
    assert {id(half.driver.policy) for half in source._halves} == {id(other)}


@pytest.mark.full
def test_ppo_reaches_the_optimum_of_the_point_mass():
    env, policy = gaussian(64)
    critic = ValueCritic({"state": 2, "time": 1}, width=32)
    config = PPOConfig(epochs=4, minibatch=256, lr=5e-3, critic_lr=5e-3, lr_bounds=(1e-5, 1e-2), critic_warmup=1)
    ppo = PPO(policy, policy.trainable(), critic, replace(config, gamma=0.95, target_kl=0.1), seeded())
    source = WindowConfig(64, 16, overlap=True).build(env, policy, SeedStream(0, 10**6), seeded(1))
    assert isinstance(source, OverlappedSource)

    def deployed() -> float:
        return evaluate(make("point_mass", num_envs=64), policy, range(10**6, 10**6 + 64), 0).rate.success

    assert deployed() < 0.3
    for _ in range(20):
        ppo.update(source.next())
    assert deployed() > 0.95
    source.close()
    assert env.log[-1] == "closed"


def test_behind_isolation_and_what_is_split_is_not_stepped_as_a_whole(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with closing(make("isolated", num_envs=5, env="counting", workers=3)) as env:
        source, whole = overlapped(env=env), plain()
        sizes = [half.env.num_envs for half in source._halves]
        assert sizes == [1, 4], "halves are of whole workers"
        for _ in range(2):
            one, other = source.next(), whole.next()
            assert_same(one, other)
            assert one.info["time/wait_s"] > 0
        state = source.state_dict()
        expected = source.next()
        source.load_state_dict(state)
        assert_same(source.next(), expected)
        with pytest.raises(ContractError, match="was split"):
            env.reset([0], [1])


class Forgiving(AuditingPolicy):
    """Episodes may be broken off."""

    def reset_state(self, state, env_ids):
        return {**state, "fresh": state["fresh"].index_fill(0, torch.as_tensor(env_ids), True)}


def test_a_worker_that_dies_ends_its_own_episodes_only(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    options = {"method": "step", "trouble": "killed", "folder": str(tmp_path), "seed": START, "times": 1}
    troubled = "tests.sims.isolation.troubled:make"
    with closing(make("isolated", num_envs=4, env=troubled, options=options, workers=2)) as env:
        source = OverlappedSource(env, Forgiving(4), 9, SeedStream(START, START + 500), seeded())
        with pytest.warns(UserWarning, match="the last words"):
            rollout = source.next()
    assert rollout.info["rollout/truncated_by_worker"] == 2 and not rollout.valid[0, :2].any()
    ends = (rollout.terminated | rollout.truncated).nonzero().tolist()
    seeds = [int(rollout.seeds[t, e]) for t, e in ends]
    assert seeds[:2] == [START, START + 1] and len(seeds) > 6
    for seed in seeds[2:]:
        assert int(rollout.valid[rollout.seeds == seed].sum()) == episode_length(np.array(seed))


def test_an_environment_without_halves_is_refused_in_one_sentence(monkeypatch):
    with pytest.raises(UserError, match=r"CountingEnv of 'counting' has no halves.*isolated.*overlap"):
        WindowConfig(4, 2, overlap=True).build(
            make("counting", num_envs=4), AuditingPolicy(4), SeedStream(0, 9), seeded()
        )
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with (
        closing(make("isolated", num_envs=2, env="counting")) as env,
        pytest.raises(UserError, match=r"one worker.*cannot be stepped in halves.*workers"),
    ):
        overlapped(env=env)
