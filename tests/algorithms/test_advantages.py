"""GAE over ragged chunks against golden fractions and a brute-force reference (reference/algorithms.md 2.1-2.5)."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.toys import TwoProcesses
from vla_rl.algorithms.ppo import chunk_reward, gae, normalize
from vla_rl.contract.batch import OneProcess

NAN = math.nan


def decisions(
    envs: list[list[tuple[Any, ...]]], last: list[float], lam: float = 0.5, **options: Any
) -> tuple[Any, Any]:
    """GAE of ``envs``: per environment, decisions ``(rewards, value, end, value after it)`` of any length up to H.

    ``end`` is "", "term" or "trunc"; the value after a decision is that of the next one unless given.
    """
    chunk = max(len(d[0]) for env in envs for d in env)
    shape = len(envs[0]), len(envs)
    reward, valid = torch.full((*shape, chunk), NAN), torch.zeros(*shape, chunk, dtype=torch.bool)
    value, after = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    ends = {end: torch.zeros(shape, dtype=torch.bool) for end in ("", "term", "trunc")}
    for e, env in enumerate(envs):
        values = [d[1] for d in env] + [last[e]]
        for j, (rewards, v, end, *final) in enumerate(env):
            reward[j, e, : len(rewards)] = torch.tensor(rewards)
            valid[j, e, : len(rewards)] = True
            value[j, e], ends[end][j, e] = v, True
            after[j, e] = final[0] if final else values[j + 1]
    return gae(reward, valid, ends["term"], ends["trunc"], value, after, options.get("gamma", 0.5), lam)


def check(envs: list[list[tuple[Any, ...]]], last: list[float], expected: list[list[float]], **options: Any) -> Tensor:
    advantage, returns = decisions(envs, last, **options)
    values = torch.tensor([[d[1] for d in env] for env in envs], dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(advantage.T, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns.T, wanted + values, rtol=0, atol=1e-12)
    return advantage


def test_g1_lambda_per_decision():
    check([[([1.0, 2.0], 1, ""), ([0.0, 4.0], 2, "")]], [8], [[7 / 4, 2]])


def test_g3_terminated_inside_a_chunk():
    envs = [[([0.0, 0.0, 1.0], 0.5, "term", NAN), ([0.0] * 4, 2, "")]]  # the value after a termination is not used
    check(envs, [4], [[-1 / 4, -7 / 4]])


def test_g4_truncated_inside_a_chunk():
    check([[([0.0, 0.0, 1.0], 0.5, "trunc", 8), ([0.0] * 4, 2, "")]], [4], [[3 / 4, -7 / 4]])


def test_g5_ragged_chunks():
    envs = [[([1.0] * 4, 1, ""), ([2.0], 2, "trunc", 6), ([0.0, 1.0, 1.0, 0.0], 1, "")]]
    check(envs, [4], [[35 / 32, 3, 0]])


def test_g6_two_rows_and_normalisation():
    envs = [
        [([1.0, 0.0], 1, ""), ([0.0, 2.0], 3, "trunc", 2), ([1.0, 1.0], 0, "")],
        [([0.0, 0.0], 2, "term"), ([0.0, 1.0], 1, ""), ([4.0], 2, "term")],
    ]
    advantage = check(envs, [4, 0], [[3 / 8, -3 / 2, 5 / 2], [-2, 1 / 2, 2]], lam=1.0)
    normal = normalize(advantage, torch.ones(3, 2, dtype=torch.bool), OneProcess())
    expected = [0.03791, -1.09951, 1.32699, -1.40282, 0.11374, 1.02368]
    assert normal.T.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_g7_decision_without_actions():
    check([[([1.0, 1.0], 1, "term"), ([], 50, ""), ([1.0, 1.0], 2, "")]], [4], [[1 / 2, 0, 1 / 2]])


def test_idle_decisions_are_skipped():
    """Idle decisions in mid-episode do not change the advantages of the others."""
    before, after = ([1.0, 2.0], 1, "", 2), ([0.0, 4.0], 2, "")
    check([[before, ([], 50, "", 70), ([], -50, "", 90), after]], [8], [[7 / 4, 0, 0, 2]])


def test_an_end_while_idle_separates_episodes():
    """Stopped between two decisions (a person, a lost connection): what comes after is another episode."""
    rows = [[([1.0, 2.0], 1, "", 2), ([], 2, "trunc", 2), ([100.0, 100.0], 5, "")]]
    advantage, _ = decisions(rows, [8])
    assert advantage[0, 0].item() == 1 + 2 / 2 + 2 / 4 - 1


def test_latched_end_flags_change_nothing():
    once = [[([1.0], 1, "term"), ([], 0, ""), ([2.0], 1, "")]]
    latched = [[([1.0], 1, "term"), ([], 0, "term"), ([2.0], 1, "")]]
    assert torch.equal(decisions(once, [3])[0], decisions(latched, [3])[0])


# -- brute force ---------------------------------------------------------------------------------------------------


def brute_force(row: list[dict[str, Any]], gamma: float, lam: float) -> list[float]:
    """2.4: advantages of an environment without idle decisions, each the weighted sum of its n-decision returns."""
    return [_n_decision_returns(row, j, gamma, lam) - d["value"] for j, d in enumerate(row)]


def _n_decision_returns(row: list[dict[str, Any]], j: int, gamma: float, lam: float) -> float:
    end = next((q for q in range(j, len(row)) if row[q]["end"]), len(row) - 1)
    total, gained, actions, weight = 0.0, 0.0, 0, 1.0
    for q in range(j, end + 1):
        for r in row[q]["reward"]:
            gained += gamma**actions * r
            actions += 1
        ahead = 0.0 if row[q]["end"] == "term" else row[q]["after"]
        total += weight * (1.0 if q == end else 1.0 - lam) * (gained + gamma**actions * ahead)
        weight *= lam
    return total


def random_env(rng: np.random.Generator, length: int, chunk: int) -> list[dict[str, Any]]:
    """Decisions of one environment: ragged where an episode ended, sometimes followed by idle ones."""
    row: list[dict[str, Any]] = []
    while len(row) < length:
        end = str(rng.choice(["", "", "", "term", "trunc"]))
        count = int(rng.integers(1, chunk + 1)) if end else chunk
        reward = rng.normal(size=count).tolist()
        row.append({"reward": reward, "value": rng.normal(), "end": end, "after": rng.normal()})
        while rng.random() < 0.2:
            row.append({"reward": [], "value": rng.normal(), "end": end if rng.random() < 0.5 else "", "after": NAN})
    row = row[:length]
    live = [d for d in row if d["reward"]]
    for one, next_features in pairwise(live):
        one["after"] = one["after"] if one["end"] else next_features["value"]
    return row


def stack(envs: list[list[dict[str, Any]]], chunk: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """``reward, valid, terminated, truncated, value, next_value``; NaN wherever nothing may be read."""
    shape = len(envs[0]), len(envs)
    reward, valid = torch.full((*shape, chunk), NAN, dtype=dtype), torch.zeros(*shape, chunk, dtype=torch.bool)
    flags, values = torch.zeros(2, *shape, dtype=torch.bool), torch.zeros(2, *shape, dtype=dtype)
    for e, env in enumerate(envs):
        for j, d in enumerate(env):
            valid[j, e, : len(d["reward"])] = True
            reward[j, e, : len(d["reward"])] = torch.tensor(d["reward"], dtype=dtype)
            flags[0, j, e], flags[1, j, e] = d["end"] == "term", d["end"] == "trunc"
            values[0, j, e], values[1, j, e] = d["value"], NAN if d["end"] == "term" else d["after"]
    return reward, valid, *flags, *values


def test_equals_brute_force_on_150_ragged_cases():
    rng = np.random.default_rng(0)
    for _ in range(150):
        length, chunk = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        gamma, lam = rng.uniform(0.5, 1.0), rng.uniform(0.0, 1.0)
        envs = [random_env(rng, length, chunk) for _ in range(3)]
        values = torch.tensor([[d["value"] for d in env] for env in envs], dtype=torch.float64).T
        wanted = torch.zeros_like(values)
        for e, env in enumerate(envs):
            live = [j for j, d in enumerate(env) if d["reward"]]
            exact = brute_force([env[j] for j in live], gamma, lam)
            wanted[live, e] = torch.tensor(exact, dtype=torch.float64)
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            advantage, returns = gae(*stack(envs, chunk, dtype), gamma, lam)
            assert advantage.dtype == returns.dtype == dtype
            assert (advantage - wanted).abs().max() <= bound and (returns - wanted - values).abs().max() <= bound


# -- what must agree ------------------------------------------------------------------------------------------------


def chunked(size: int, lam: float) -> Tensor:
    """Advantages of one 20-action episode at its decisions, in chunks of ``size``, [20/size]."""
    rng = np.random.default_rng(3)
    reward, value = torch.tensor(rng.normal(size=20)), torch.tensor(rng.normal(size=21))
    valid, none = torch.ones(20 // size, 1, size, dtype=torch.bool), torch.zeros(20 // size, 1, dtype=torch.bool)
    first, last = value[:-1:size].unsqueeze(1), value[size::size].unsqueeze(1)
    advantage, _ = gae(reward.view(-1, 1, size), valid, none, none, first, last, 0.9, lam)
    return advantage[:, 0]


def test_with_lambda_one_the_chunking_does_not_matter():
    torch.testing.assert_close(chunked(5, 1.0), chunked(1, 1.0)[::5], rtol=0, atol=1e-12)


def test_one_action_per_decision_is_ordinary_gae():
    rng = np.random.default_rng(3)
    reward, value = rng.normal(size=20), rng.normal(size=21)
    advantage, expected = 0.0, np.zeros(20)
    for t in reversed(range(20)):
        advantage = reward[t] + 0.9 * value[t + 1] - value[t] + 0.9 * 0.7 * advantage
        expected[t] = advantage
    np.testing.assert_allclose(chunked(1, 0.7), expected, atol=1e-12)


def test_chunk_reward_discounts_over_valid_actions():
    reward = torch.tensor([[1.0, 2.0, NAN], [math.inf, 4.0, 8.0], [NAN, NAN, NAN]])
    valid = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    total, count = chunk_reward(reward, valid, 0.5)
    assert total.tolist() == [2.0, 8.0, 0.0] and total.dtype == torch.float64
    assert count.tolist() == [2, 2, 0]


# -- normalisation over processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_normalisation_does_not_depend_on_processes(cut):
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(7, 20, generator=generator) * 3 + 100
    mask = torch.rand(7, 20, generator=generator) < 0.7
    whole = normalize(advantage, mask, OneProcess())
    halves = [(advantage[:, part], mask[:, part]) for part in (slice(0, cut), slice(cut, None))]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda half, reducer: normalize(*half, reducer), halves, TwoProcesses.pair()))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)
    kept = whole[mask].double()
    assert abs(kept.mean().item()) < 1e-6 and kept.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_normalisation_ignores_what_is_masked():
    advantage = torch.tensor([1.0, NAN, 3.0, math.inf])
    mask = torch.tensor([True, False, True, False])
    assert normalize(advantage, mask, OneProcess()).tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)
    assert normalize(advantage, torch.zeros(4, dtype=torch.bool), OneProcess()).tolist() == [0, 0, 0, 0]
    assert normalize(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool), OneProcess()).abs().max().item() < 1e-6
