"""Running statistics: exact however the data came, still while a policy acts and learns, and carried like weights."""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Thread

import pytest
import torch

from sims.catalog import make
from tests.toys import TwoProcesses, seeded
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.check import check_policy
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Observer
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import RunningCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.normalization import (
    Affine,
    FixedStandardizer,
    RunningStandardizer,
    RunningStatistics,
    action_limits,
    check_same_env,
)
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.training.loop import BestWeights

NUM_ENVS = 8


def data(count: int = 1000) -> torch.Tensor:
    """Entries of very different size, one of them far from 0."""
    return torch.randn(count, 3, generator=seeded(), dtype=torch.float64) * torch.tensor([1e-3, 5, 40]) + 1000


def state_policy(horizon: int = 2) -> tuple[GaussianPolicy, object]:
    torch.manual_seed(0)
    env = make("gym", num_envs=NUM_ENVS, id="InvertedPendulum-v5", privileged={"velocity": [2, 3]})
    policy = GaussianPolicy(env.spec, RunningStatistics(2), GaussianConfig(horizon, width=16))
    torch.nn.init.normal_(policy.network[-1].weight, std=0.5)
    return policy, env


def learner(policy: GaussianPolicy, **changes) -> PPO:
    torch.manual_seed(1)
    critic = RunningCritic({"state": 2, "privileged/velocity": 2}, width=16)
    config = replace(PPOConfig(minibatch=32, lr=1e-3, critic_warmup=0), **changes)
    return PPO(policy, policy.trainable(), critic, config, seeded(2))


def source(policy: GaussianPolicy, env: object) -> RolloutSource:
    return RolloutSource(env, policy, 8, SeedStream(0, 1000), seeded(1), ("privileged/velocity",))


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1000], [1, 999], [10, 500, 1, 489]])
def test_merged_statistics_are_those_of_all_the_data(sizes):
    running, values = RunningStandardizer(3), data()
    for part in values.split(sizes):
        running.observe(part, OneProcess())
    torch.testing.assert_close(running.mean.data, values.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(running.variance.data, values.var(0, correction=0), rtol=1e-9, atol=0)
    assert running.count == 1000
    standard = running(values)
    assert standard.mean(0).abs().max() < 1e-9 and (standard.std(0, correction=0) - 1).abs().max() < 2e-2
    expected = (values - values.mean(0)) / (values.var(0, correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(standard, expected.clamp(-10, 10), rtol=1e-6, atol=1e-8)


def test_by_hand():
    running = RunningStandardizer(1)
    running.observe(torch.tensor([[1.0], [3.0]]), OneProcess())
    running.observe(torch.tensor([[8.0]]), OneProcess())
    assert (running.count, running.mean, running.variance) == (3, 4, pytest.approx(26 / 3))


def test_several_processes_have_the_statistics_of_one():
    alone, values, found = RunningStandardizer(3), data(), {}
    for part in values.split(500):
        alone.observe(part, OneProcess())

    def share(reducer: TwoProcesses) -> None:
        mine = RunningStandardizer(3)
        for part in values.split(500):
            mine.observe(part[:100] if reducer.rank else part[100:], reducer)
        found[reducer.rank] = mine

    threads = [Thread(target=share, args=(reducer,)) for reducer in TwoProcesses.pair()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, expected in alone.state_dict().items():
        one, two = (found[rank].state_dict()[name] for rank in (0, 1))
        assert torch.equal(one, two), "both processes have the same statistics"
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=0)


def test_digits_far_from_zero_are_kept():
    running = RunningStandardizer(1)
    running.observe(torch.tensor([[10_000.0], [10_000.002]], dtype=torch.float64), OneProcess())
    value = torch.tensor([[10_000.002]])  # float32: 10000.001953125
    expected = (float(value) - 10_000.001) / math.sqrt(1e-6 + 1e-8)
    assert float(running(value)) == pytest.approx(expected, abs=1e-4)


def test_what_never_changed_is_zero_and_nothing_exceeds_ten():
    running = RunningStandardizer(2)
    running.observe(torch.tensor([[7.0, 1.0], [7.0, 2.0]]), OneProcess())
    assert running(torch.tensor([[7.0, 1e6]])).tolist() == [[0.0, 10.0]]
    assert running(torch.tensor([[7.1, -1e6]])).tolist() == [[10.0, -10.0]]


def test_fixed_statistics_are_those_of_the_affine_and_stay():
    affine = Affine((0.1, -2.0), (0.5, 3.0))
    fixed, values = FixedStandardizer(affine), torch.randn(5, 2, generator=seeded())
    expected = affine.normalize(values)
    fixed.observe(100 * values, OneProcess())
    torch.testing.assert_close(fixed(values), expected)


# -- in a policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5 * math.sqrt(2)), (torch.float64, 1e-9)])
def test_the_ratio_is_one_before_every_update(dtype, bound):
    policy, env = state_policy()
    policy, made = policy.to(dtype), source(policy, env)
    ppo = learner(policy)
    for iteration in range(4):
        rollout = made.next()
        assert ppo.update(rollout)["policy/logprob_gap"] <= bound
        assert policy.standardize.count == 8 * NUM_ENVS * (iteration + 1), "each decision counts once"
    assert (policy.standardize.variance < 0.5).all(), "nothing was observed"


def test_statistics_move_after_the_update_only():
    policy, env = state_policy()
    rollout, ppo = source(policy, env).next(), learner(policy)
    before, during = policy.standardize.mean.clone(), []
    exact = policy.log_prob
    policy.log_prob = lambda *given: (during.append(policy.standardize.mean.clone()), exact(*given))[1]
    ppo.update(rollout)
    assert len(during) > 3 and all(torch.equal(mean, before) for mean in during)
    expected = rollout.features["state"][:-1].flatten(0, 1).double()
    torch.testing.assert_close(policy.standardize.mean.data, expected.mean(0))
    observed = torch.cat([rollout.features[name][:-1].flatten(0, 1) for name in ("state", "privileged/velocity")], -1)
    torch.testing.assert_close(ppo.critic.inputs.mean, observed.mean(0), rtol=1e-5, atol=1e-6)


def test_gradients_leave_the_statistics_alone():
    policy, env = state_policy()
    ppo = learner(policy)
    policy.observe = lambda features, reducer: None
    kept = {name: item.clone() for name, item in policy.trainable().items()}
    ppo.update(source(policy, env).next())
    for name, item in policy.trainable().items():
        assert torch.equal(item, kept[name]) == name.startswith("standardize"), name


def test_statistics_go_wherever_weights_go(tmp_path):
    policy, env = state_policy()
    ppo, made = learner(policy), source(policy, env)
    ppo.update(made.next())
    best, state = BestWeights(), made.next().features["state"][0]
    best.offer(1.0, 1, ppo.parameters)
    saved = {name: item.clone() for name, item in ppo.state_dict()["parameters"].items()}
    expected = policy.mean({"state": state})
    policy.save_pretrained(tmp_path / "it")
    ppo.update(made.next())
    assert not torch.equal(policy.mean({"state": state}), expected)
    assert torch.equal(load_policy(tmp_path / "it").mean({"state": state}), expected), "checkpoint"
    best.restore(ppo.parameters)
    assert torch.equal(policy.mean({"state": state}), expected), "best weights"
    restored, _ = state_policy()
    learner(restored).load_state_dict({**ppo.state_dict(), "parameters": saved})
    assert torch.equal(restored.mean({"state": state}), expected), "training state"
    assert isinstance(policy, Observer) and restored.standardize.count == 8 * NUM_ENVS


def test_a_policy_with_running_statistics_keeps_the_contract():
    policy, env = state_policy()
    assert len(check_policy(policy, env, seeded())) == 3
    with pytest.raises(ContractError, match="normalize by statistics of data"):
        GaussianPolicy(env.spec)


# -- words and bounds ------------------------------------------------------------------------------------------------

TEXTS = ("pick up the red cube", "Put the cube down!")


def test_words_are_numbered_in_order_and_zero_is_padding():
    vocabulary = Vocabulary.from_texts(TEXTS, length=6)
    assert vocabulary.words == ("cube", "down", "pick", "put", "red", "the", "up")
    assert vocabulary.encode(TEXTS).tolist() == [[3, 7, 6, 5, 1, 0], [4, 6, 1, 2, 0, 0]]
    assert Vocabulary.from_texts(reversed(TEXTS), length=6) == vocabulary


def test_the_longest_instruction_decides_the_length():
    vocabulary = Vocabulary.from_texts(["the " * 30 + "cube"], length=6)
    assert vocabulary.length == 31 and vocabulary.encode(["cube"]).shape == (1, 31)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hebe den ROTEN Würfel auf!", ("auf", "den", "hebe", "roten", "würfel")),
        ("подними красный куб", ("красный", "куб", "подними")),
        ("拿起红色方块", ("块", "拿", "方", "红", "色", "起")),
        ("ブロックを取る", ("を", "ク", "ッ", "ブ", "ロ", "取", "る")),
        ("लाल घन उठाओ", ("उठाओ", "घन", "लाल")),
        ("pick_up the ２nd-cube", ("2nd", "cube", "pick", "the", "up")),
        ("", ()),
    ],
)
def test_instructions_of_any_script_are_read(text, words):
    vocabulary = Vocabulary.from_texts([text])
    assert sorted(vocabulary.words) == sorted(words)
    assert (vocabulary.encode([text]) > 0).sum() == len(words)


def test_bounds_become_one():
    affine = Affine.from_bounds(ArraySpec((2,), "float32", (-0.03, 0.0), (0.03, 4.0)))
    bounds = torch.tensor([[-0.03, 0.0], [0.0, 2.0], [0.03, 4.0]])
    torch.testing.assert_close(affine.normalize(bounds), torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(affine.unnormalize(affine.normalize(bounds)), bounds)
    with pytest.raises(ContractError, match="entry 1"):
        Affine.from_bounds(ArraySpec((2,), "float32", 0.0, (1.0, 0.0)))


def test_data_becomes_standard_and_a_constant_stays_finite():
    values = torch.randn(500, 4, 3, generator=torch.Generator().manual_seed(0)) * 7 + 100
    values[..., 2] = 5.0
    normalized = Affine.from_data(values).normalize(values).reshape(-1, 3)
    torch.testing.assert_close(normalized.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(normalized.std(0), torch.tensor([1.0, 1.0, 0.0]), rtol=0, atol=1e-4)


def test_a_policy_is_refused_another_environment():
    spec = make("counting", num_envs=1).spec
    check_same_env(spec, replace(spec, tasks=(*spec.tasks, "a later one"), name="renamed", time_limit=99))
    slower = replace(spec, control_dt=0.2)
    wider = replace(spec, action=replace(spec.action, high=(65.0, 7.0)))
    mixed = replace(spec, tasks=spec.tasks[::-1])
    for given, part in [
        (slower, "control_dt"),
        (wider, "action"),
        (mixed, "task table"),
        (replace(spec, images={}), "images"),
    ]:
        with pytest.raises(ContractError, match=part):
            check_same_env(spec, given)
    low, high = action_limits(spec)
    assert low.tolist() == [-64, 0] and high.tolist() == [64, 2**20]
