"""GRPO and RLOO: gradients and losses by hand, what may enter, and decisions that are old."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.toys import FlowToy, TwoProcesses, columns, same, seeded, weights
from vla_rl.algorithms.group_relative import (
    GRPO,
    Constant,
    Global,
    GRPOConfig,
    LeaveOneOut,
    Mean,
    PerTrajectory,
    RLOOConfig,
    Standardised,
    group_advantages,
    truncation_return,
)
from vla_rl.contract.batch import TRUNCATION_RETURN, OneProcess, Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde

LEAVE_ONE_OUT, MEAN, STANDARDISED = LeaveOneOut(), Mean(), Standardised()


# -- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "baseline", "expected"),
    [
        ((1, 0, 0, 0), MEAN, (0.75, -0.25, -0.25, -0.25)),
        ((1, 0, 0, 0), STANDARDISED, (1.5, -0.5, -0.5, -0.5)),
        ((1, 0, 0, 0), LEAVE_ONE_OUT, (1, -1 / 3, -1 / 3, -1 / 3)),
        ((3, 1, 2, 2), MEAN, (1, -1, 0, 0)),
        ((3, 1, 2, 2), STANDARDISED, (1.22474, -1.22474, 0, 0)),
        ((3, 1, 2, 2), LEAVE_ONE_OUT, (1.33333, -1.33333, 0, 0)),
    ],
)
def test_golden_advantages(returns, baseline, expected):
    found = group_advantages(torch.tensor(returns, dtype=torch.float64), torch.zeros(4).long(), baseline)
    assert found.tolist() == pytest.approx(expected, abs=6e-6)


def test_group_advantages_equal_brute_force_in_any_order():
    for case in range(12):
        generator = seeded(case)
        sizes = torch.randint(2, 9, (4,), generator=generator).tolist()
        seeds = torch.cat([torch.full((n,), 1000 * g) for g, n in enumerate(sizes)])
        seeds = seeds[torch.randperm(len(seeds), generator=generator)]
        returns = torch.randn(len(seeds), generator=generator, dtype=torch.float64)
        for e, seed in enumerate(seeds.tolist()):
            group = [returns[i].item() for i in range(len(seeds)) if seeds[i] == seed]
            mine, n = returns[e].item(), len(group)
            mean = sum(group) / n
            std = math.sqrt(sum((r - mean) ** 2 for r in group) / (n - 1))
            expected = {
                LEAVE_ONE_OUT: mine - (sum(group) - mine) / (n - 1),
                MEAN: mine - mean,
                STANDARDISED: (mine - mean) / (std + 1e-6),
            }
            for baseline, value in expected.items():
                assert group_advantages(returns, seeds, baseline)[e].item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("baseline", [LEAVE_ONE_OUT, MEAN, STANDARDISED])
def test_equal_returns_have_advantages_of_exactly_zero(baseline):
    returns = torch.tensor([0.1, 0.1, 0.1, 5.0, 0.7], dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is not 3 * 0.1
    assert group_advantages(returns, torch.tensor([1, 1, 1, 2, 2]), baseline)[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("baseline", [LEAVE_ONE_OUT, MEAN])
def test_returns_apart_by_rounding_have_hardly_an_advantage(baseline):
    """Forty rewards of 0.1 in float32, added up in another order for each member."""
    steps = torch.full((8, 40), 0.1) * (1 + 1e-7 * torch.arange(8)[:, None])
    returns = 100 * torch.cumsum(steps, 1)[:, -1]
    assert len(returns.unique()) > 1
    advantage = group_advantages(returns, torch.zeros(8, dtype=torch.int64), baseline)
    assert advantage.isfinite().all() and advantage.abs().max() < 1e-3


def bernoulli(p: float, size: int, baseline, kept=lambda outcome: True) -> float:
    """The expected gradient of a group of coins with respect to ``p``, by enumeration; that of success is 1.

    ``kept`` says which outcomes count; the others' probability is left out.
    """
    total = mass = 0.0
    for outcome in product((0.0, 1.0), repeat=size):
        if kept(outcome):
            chance = math.prod(p if win else 1 - p for win in outcome)
            advantage = group_advantages(torch.tensor(outcome).double(), torch.zeros(size).long(), baseline).tolist()
            score = [1 / p if win else -1 / (1 - p) for win in outcome]
            total += chance * sum(a * s for a, s in zip(advantage, score, strict=True)) / size
            mass += chance
    return total / mass


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (LEAVE_ONE_OUT, {0.02: 1, 0.1: 1, 0.5: 1}),
        (MEAN, {0.02: 7 / 8, 0.1: 7 / 8, 0.5: 7 / 8}),
        (STANDARDISED, {0.02: 2.41, 0.05: 2.31, 0.1: 2.18, 0.3: 1.84, 0.5: 1.74}),
    ],
)
def test_the_expected_gradient_by_enumeration(baseline, expected):
    tolerance = 0.005 if baseline is STANDARDISED else 1e-9
    assert {p: bernoulli(p, 8, baseline) for p in expected} == pytest.approx(expected, abs=tolerance)


def test_filtering_mixed_groups_scales_all_tasks_alike():
    """Refilled with new tasks, both of two tasks get 1.505 times their gradient; with repeated ones, 2.97 and 1.01."""
    mixed = {p: 1 - p**8 - (1 - p) ** 8 for p in (0.05, 0.5)}
    given = {p: bernoulli(p, 8, LEAVE_ONE_OUT, lambda outcome: len(set(outcome)) == 2) for p in mixed}
    assert {p: 2 * mixed[p] / sum(mixed.values()) * given[p] for p in mixed} == pytest.approx(
        dict.fromkeys(mixed, 1.505), abs=1e-3
    )
    assert given == pytest.approx({0.05: 2.97, 0.5: 1.01}, abs=5e-3)


def test_a_group_of_one_episode_is_refused():
    with pytest.raises(ContractError, match=r"group of seed 3 has one episode"):
        group_advantages(torch.ones(3), torch.tensor([1, 1, 3]), LEAVE_ONE_OUT)


# -- averages ---------------------------------------------------------------------------------------------------------


def test_weights_by_hand():
    decisions, one = torch.tensor([2, 4, 0]), OneProcess()
    assert GLOBAL.weights(decisions, one).tolist() == pytest.approx([1 / 6] * 3)
    assert CONSTANT.weights(decisions, one).tolist() == pytest.approx([1 / 15] * 3)
    assert PER_TRAJECTORY.weights(decisions, one).tolist() == pytest.approx([1 / 6, 1 / 12, 1 / 3])
    assert GLOBAL.weights(torch.zeros(2).long(), one).isfinite().all()


def test_only_per_trajectory_can_prefer_the_worse_action():
    """X succeeds in 50 % (1 decision, 4 to fail), Y in 55 % (3, 4); against 52.5 %, one decision by each of them."""
    chances = {"X": [(0.5, 1, 1), (0.5, 0, 4)], "Y": [(0.55, 1, 3), (0.45, 0, 4)]}

    def push(averaging, action):
        decisions = torch.tensor([length for _, _, length in chances[action]])
        weight = averaging.weights(decisions, OneProcess()) * (len(decisions) if averaging is PER_TRAJECTORY else 1)
        return sum(p * (win - 0.525) * w for (p, win, _), w in zip(chances[action], weight.tolist(), strict=True))

    assert push(PER_TRAJECTORY, "X") == pytest.approx(0.1719, abs=1e-4)
    assert push(PER_TRAJECTORY, "Y") == pytest.approx(0.0280, abs=1e-4)
    for averaging in (GLOBAL, CONSTANT):
        assert push(averaging, "X") < 0 < push(averaging, "Y")


SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)
GLOBAL, CONSTANT, PER_TRAJECTORY = Global(), Constant(5), PerTrajectory()
# Episodes of three groups: (seed, decisions, rewards of the last one's two actions); the last group is uniform.
EPISODES = [
    (7, 2, (1, 0)),
    (7, 4, (0, 0)),
    (7, 3, (1, 1)),
    (4, 1, (0, 1)),
    (4, 4, (0, 0)),
    (9, 2, (0, 1)),
    (9, 3, (1, 0)),
]


def learner(config=None, policy=None, reducer=None, **changes):
    torch.manual_seed(0)
    policy, config = policy or FlowToy(sampler=SDE, width=16), replace(config or GRPOConfig(), **changes)
    return config.build(policy, policy.trainable(), None, seeded(), reducer)


def play(policy, episodes=EPISODES, seed=1, horizon=2) -> Rollout:
    """Random states, actions by ``policy``; columns of unequal length, succeeding where they earned something."""
    columns, length = len(episodes), max(item[1] for item in episodes)
    state = torch.randn(length + 1, columns, 1, generator=seeded(seed))
    outs = [policy.act({"state": state[t]}, {}, "sample", seeded(seed + t))[0] for t in range(length)]
    reward, valid = torch.full((length, columns, horizon), math.nan), torch.zeros(length, columns, horizon).bool()
    ends = torch.zeros(length, columns, dtype=torch.bool)
    for e, (_, count, last) in enumerate(episodes):
        reward[:count, e], valid[:count, e], ends[count - 1, e] = 0.0, True, True
        reward[count - 1, e] = torch.tensor(last, dtype=torch.float)
    earned = torch.where(valid, reward, 0.0).sum((0, 2)) > 0
    return Rollout(
        features={"state": state},
        sample=torch.stack([out.sample for out in outs]),
        executed=torch.stack([out.action for out in outs]),
        aux={name: torch.stack([out.aux[name] for out in outs]) for name in outs[0].aux},
        logprob=torch.stack([out.logprob for out in outs]),
        reward=reward,
        valid=valid,
        intervened=torch.zeros_like(valid),
        terminated=ends & earned,
        truncated=ends & ~earned,
        success=ends & earned,
        version=torch.zeros(length, columns, dtype=torch.long),
        final_index=(ends & ~earned).nonzero(),
        final_features={"state": state[1:][ends & ~earned]},
        seeds=torch.tensor([item[0] for item in episodes]).expand(length, -1),
        info={"env/steps": float(valid.sum())},
    )


# -- objectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GRPOConfig(), RLOOConfig()], ids=["grpo", "rloo"])
@pytest.mark.parametrize("averaging", [GLOBAL, CONSTANT, PER_TRAJECTORY])
def test_the_first_gradient_is_the_policy_gradient(config, averaging):
    """Term by term: which decisions count, with which advantage and weight; minibatches average to the whole."""
    grpo = learner(config, averaging=averaging)
    experience = play(grpo.policy)
    experience.intervened[3, 1, 1] = True  # the second episode's last decision does not count
    new = [
        grpo.policy.log_prob({"state": experience.features["state"][t]}, *_at(experience, t)).logprob for t in range(4)
    ]
    advantage = {0: 1 - 2 / 2, 1: 0 - 3 / 2, 2: 2 - 1 / 2, 3: 1 - 0, 4: 0 - 1, 5: 0, 6: 0}
    counted = [(t, e) for e, (_, count, _) in enumerate(EPISODES) for t in range(count) if (t, e) != (3, 1)]
    units = [sum(e == other for _, other in counted) for e in range(7)]
    weight = {
        GLOBAL: lambda e: 1 / len(counted),
        CONSTANT: lambda e: 1 / 35,
        PER_TRAJECTORY: lambda e: 1 / 7 / units[e],
    }
    loss = -sum(weight[averaging](e) * advantage[e] * new[t][e] for t, e in counted)
    expected = torch.autograd.grad(loss, grpo.parameters.values())
    batch, metrics = grpo._make_batch(experience)
    assert (
        metrics["rollout/decisions"] == len(batch.logprob) == 3 + 3 + 1 + 4
    )  # the first episode is as good as the others
    found = torch.autograd.grad(
        grpo.policy_loss(batch, grpo.policy.log_prob(batch.features, batch.sample, batch.aux))[0],
        grpo.parameters.values(),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def _at(experience: Rollout, t: int):
    return experience.sample[t], {name: item[t] for name, item in experience.aux.items()}


def test_clipped_and_unclipped_objectives_by_hand():
    ratio, advantage = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1]), torch.tensor([3.0, 1.0, -1.0, -1.0, 2.0])
    objective, clipped = learner().objective(ratio, advantage)
    assert objective.tolist() == pytest.approx([3 * 1.28, 0.5, -1.5, -0.8, 2.2]) and clipped.tolist() == [1, 1, 1, 1, 0]
    objective, clipped = learner(RLOOConfig()).objective(ratio, advantage)
    assert objective.tolist() == pytest.approx([4.5, 0.5, -1.5, -0.5, 2.2]) and not clipped.any()


# -- what enters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GRPOConfig(), RLOOConfig()], ids=["grpo", "rloo"])
def test_idle_intervened_and_later_decisions_never_enter(config):
    """Whatever stands in their samples, the result is the same to the last bit."""
    ends = []
    for poison in (float("nan"), 7.0):
        grpo = learner(config)
        experience = play(grpo.policy)
        experience.intervened[1, 2, 0] = True
        experience.success[:, 4] = torch.tensor([False, True, False, False])  # succeeds and runs on
        out = ~experience.valid.any(-1)
        out[1:, 2], out[2:, 4] = True, True  # what follows an intervention or a success
        for item in (experience.sample, experience.logprob, experience.aux["points"]):
            item[out] = poison
        metrics = grpo.update(experience)
        assert metrics["rollout/decisions"] == 2 + 4 + 1 + 1 + 2 and metrics["policy/logprob_gap"] < 1e-4
        ends.append(weights(grpo.policy))
    assert same(*ends) and all(item.isfinite().all() for item in ends[0])


def test_a_rescue_is_not_the_policys_success():
    """A person acts in the second decision of the first episode, which then earns 1: its return is that before."""
    grpo = learner()
    experience = play(grpo.policy, [(7, 4, (1, 0)), (7, 2, (0, 0)), (7, 3, (1, 0))])
    experience.reward[0, 0, 0] = 0.25  # earned by the policy itself
    experience.intervened[1, 0, 1] = True
    batch, metrics = grpo._make_batch(experience)
    assert metrics["rollout/return"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert metrics["rollout/decisions"] == 1 + 2 + 3, "nothing after the intervention is used"
    advantages = [0.25 - 1 / 2, 0 - 1.25 / 2, 1 - 0.25 / 2]
    assert sorted({round(a, 5) for a in batch.advantage.tolist()}) == pytest.approx(sorted(advantages))


@pytest.mark.parametrize("event", ["success", "intervened"])
def test_a_success_or_a_rescue_gets_no_predicted_return(event):
    """Success counts once and the time limit falls into the same chunk: the return is 1 and not 1.5."""
    grpo = learner()
    experience = play(grpo.policy, [(7, 2, (1, 0)), (7, 2, (0, 0))])
    ends = experience.terminated | experience.truncated
    final = {**experience.final_features, TRUNCATION_RETURN: torch.full((2,), 0.5, dtype=torch.float64)}
    index = torch.tensor([[1, 0], [1, 1]])
    cut = {"terminated": ends & False, "truncated": ends, "final_index": index, "final_features": final}
    experience = replace(experience, **cut)
    if event == "intervened":
        experience.success[:] = False
        experience.intervened[1, 0] = True
    expected = {"success": [0.0, 0.5], "intervened": [0.0, 0.5]}[event]
    assert truncation_return(experience).tolist() == expected


def test_what_never_enters_is_not_in_the_denominators_either():
    grpo = learner()
    experience = play(grpo.policy)
    experience.success[:, 4] = torch.tensor([False, True, False, False])
    units = 2 + 4 + 3 + 1 + 2 + 2 + 3
    batch, metrics = grpo._make_batch(experience)
    assert batch.weight.tolist() == pytest.approx(
        [metrics["rollout/decisions"] / units] * int(metrics["rollout/decisions"])
    )


def test_uniform_groups_stay_in_the_denominators():
    grpo = learner()
    whole, part = grpo._make_batch(play(grpo.policy))[0], grpo._make_batch(play(grpo.policy, EPISODES[:5]))[0]
    assert len(whole.logprob) == len(part.logprob) and whole.weight[0] / part.weight[0] == pytest.approx(14 / 19)


def test_without_a_mixed_group_nothing_changes():
    grpo = learner()
    before, rate = weights(grpo.policy), grpo.lr
    metrics = grpo.update(play(grpo.policy, EPISODES[5:]))
    assert metrics["rollout/decisions"] == 0 and metrics["rollout/return"] == 1 and same(before, weights(grpo.policy))
    assert grpo.lr == rate


def test_columns_that_are_no_whole_episodes_are_refused():
    grpo = learner()
    experience = play(grpo.policy)
    none = replace(experience, terminated=experience.terminated & False)
    seeds = experience.seeds.clone()
    seeds[1, 2] = 8
    two = experience.truncated.clone()
    two[0, 1] = True
    for broken, column in ((none, 0), (replace(experience, seeds=seeds), 2), (replace(experience, truncated=two), 1)):
        with pytest.raises(ContractError, match=rf"column {column} of the rollout is not one whole episode") as caught:
            grpo.update(broken)
        assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("averaging", [GLOBAL, CONSTANT, PER_TRAJECTORY])
def test_two_processes_that_share_the_groups_end_as_one(averaging):
    config = {"averaging": averaging, "minibatch": 4, "lr": 1e-3, "stop_kl": 1e9}
    whole = learner(**config)
    policy, experience = copy.deepcopy(whole.policy), play(whole.policy)
    expected = whole.update(experience)

    both = [learner(policy=copy.deepcopy(policy), reducer=reducer, **config) for reducer in TwoProcesses.pair()]
    parts = [columns(experience, slice(0, 3)), columns(experience, slice(3, None))]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(GRPO.update, both, parts))
    for grpo, metrics in zip(both, found, strict=True):
        for mine, one in zip(weights(grpo.policy), weights(whole.policy), strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-3, atol=2e-5)
        assert metrics["rollout/decisions"] == expected["rollout/decisions"]
        assert metrics["policy/loss"] == pytest.approx(expected["policy/loss"], rel=1e-3, abs=1e-6)
