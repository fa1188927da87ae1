"""Advantages within a group, and how decisions are averaged: golden numbers, brute force and enumeration."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from vla_rl.algorithms.group_relative import (
    Constant,
    Global,
    LeaveOneOut,
    Mean,
    PerTrajectory,
    Standardised,
    group_advantages,
)
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError

LEAVE_ONE_OUT, MEAN, STANDARDISED = LeaveOneOut(), Mean(), Standardised()
GLOBAL, CONSTANT, PER_TRAJECTORY = Global(), Constant(5), PerTrajectory()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def test_advantages_equal_brute_force_whatever_the_order_of_the_columns():
    for case in range(50):
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
def test_returns_that_only_rounding_tells_apart_have_hardly_any_advantage(baseline):
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


def test_per_trajectory_is_the_form_that_divides_by_the_share_of_the_max_decisions():
    decisions, max_decisions, loss = torch.tensor([2, 4, 3]), 5, torch.randn(5, 3, generator=seeded(0)).double()
    mask = torch.arange(max_decisions)[:, None] < decisions
    public = (loss * mask / (decisions / max_decisions)).mean()
    assert (PER_TRAJECTORY.weights(decisions, OneProcess()) * (loss * mask).sum(0)).sum().item() == pytest.approx(
        public.item()
    )


def test_per_trajectory_can_prefer_the_worse_action_and_the_others_cannot():
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
