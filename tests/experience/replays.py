"""The counting environment through a replay, and the expected content, recomputed from its rules alone."""

from __future__ import annotations

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
