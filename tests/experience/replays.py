"""The counting environment through a replay, and the expected content, recomputed from its rules alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.catalog import make
from sims.toy.counting import episode_length
from tests.auditing import AuditingPolicy
from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream

NUM_ENVS, START, GAMMA = 5, 300, 0.9
ROOMY = 2000


def source(horizon: int = 4, decisions: int = 9) -> RolloutSource:
    env = make("counting", num_envs=NUM_ENVS)
    return RolloutSource(env, AuditingPolicy(horizon), decisions, SeedStream(START, 10**9), torch.Generator())


def filled(replay: Replay, horizon: int = 4, decisions: int = 9, windows: int = 4) -> Replay:
    maker = source(horizon, decisions)
    for _ in range(windows):
        replay.add(maker.next())
    return replay


def length_of(seed: int) -> int:
    return int(episode_length(np.array(seed)))


def chunk(seed: int, steps: int, horizon: int) -> tuple[float, int]:
    """Discounted reward and number of the actions that were executed from ``steps`` on."""
    number = min(horizon, length_of(seed) - steps)
    return sum(GAMMA**i * (steps + 1 + i) for i in range(number)), number


def ended(rollout: Rollout) -> list[tuple[int, int]]:
    """(seed, environment) of the episodes that end in ``rollout``, in the order of time."""
    over = rollout.terminated | rollout.truncated
    return [(int(rollout.seeds[t, e]), e) for t in range(len(over)) for e in range(over.shape[1]) if over[t, e]]


def of_ended_episodes(replay: Replay) -> Tensor:
    """The slots of decisions whose episode has ended, int [N]."""
    cursor, _, provisional = replay._filled
    running = (cursor + torch.arange(provisional)) % replay.capacity
    decisions = replay.decisions()
    return decisions[~torch.isin(decisions, running)]


def decided(ids: Tensor, reward: Tensor, valid: Tensor, terminated: Tensor, truncated: Tensor) -> Rollout:
    """Decisions with the features ``ids`` [T+1,E]; the observation after a truncated one has the id -1 - its own."""
    final, zeros = truncated.nonzero(), torch.zeros(*reward.shape, 1)
    whole = torch.zeros(reward.shape[:2], dtype=torch.long)
    return Rollout(
        features={"id": ids},
        sample=zeros,
        executed=zeros,
        aux={},
        logprob=zeros[:, :, 0, 0],
        reward=reward,
        valid=valid,
        intervened=torch.zeros_like(valid),
        terminated=terminated,
        truncated=truncated,
        success=terminated,
        version=whole,
        final_index=final,
        final_features={"id": -1 - ids[final[:, 0], final[:, 1]]},
        seeds=whole,
    )


def line(rewards: list[float], number: int = 0, seed: int = 0, end: str = "terminated", **changes: Any) -> Rollout:
    """One environment that earns ``rewards``, one action a decision, and ends after the last unless ``end`` is ""."""
    ids, reward = number + torch.arange(len(rewards) + 1)[:, None], torch.tensor(rewards)[:, None]
    over = torch.arange(len(rewards))[:, None] == len(rewards) - 1
    valid = torch.ones_like(reward[..., None], dtype=torch.bool)
    found = decided(ids, reward[..., None], valid, over & (end == "terminated"), over & (end == "truncated"))
    return replace(found, **{"seeds": torch.full_like(found.seeds, seed), **changes})


def same(one: Transitions, two: Transitions) -> bool:
    return all(torch.equal(*pair) for pair in zip(flat(one), flat(two), strict=True))


def flat(found: Transitions) -> list[Tensor]:
    parts = [getattr(found, name) for name in Transitions.__dataclass_fields__]
    return [item for part in parts for item in (part.values() if isinstance(part, dict) else [part])]


def audit(found: Transitions, horizon: int, n_step: int) -> None:
    """Every entry is what the seed and the step of its decision imply."""
    counters = found.features["counters"].reshape(-1, 2).numpy()
    wanted: list[tuple[float, float, int, float]] = []
    for seed, begin in counters.tolist():
        length, steps, reward, discount = length_of(seed), begin, 0.0, 1.0
        for _ in range(n_step):
            if steps < length:
                part, number = chunk(seed, steps, horizon)
                reward, discount, steps = reward + discount * part, discount * GAMMA**number, steps + number
        total = sum(GAMMA**i * (begin + 1 + i) for i in range(length - begin))
        terminated = steps == length and seed % 2 == 0
        wanted.append((reward, 0.0 if terminated else discount, steps, -np.inf if seed % 2 else total))
    table = np.array(wanted).reshape(-1, 4)
    for name, column in (("reward", 0), ("discount", 1), ("returns", 3)):
        np.testing.assert_allclose(getattr(found, name), table[:, column], rtol=1e-5, err_msg=name)
    after = np.stack([counters[:, 0], table[:, 2]], 1)
    assert np.array_equal(found.next_features["counters"][table[:, 1] > 0], after[table[:, 1] > 0])
    numbers = counters[:, 1:] + 1 + np.arange(horizon)
    chosen = np.stack([numbers, np.repeat(counters[:, :1], horizon, 1)], -1)
    for actions in (found.sample, found.executed):  # what was chosen after an end stands in ``executed`` too
        assert np.array_equal(actions, chosen)
    assert not found.intervened.any()
