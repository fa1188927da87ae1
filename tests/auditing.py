"""A policy that audits its own experience: it knows the counting environment's rules and asserts that they hold.

Whatever stands between that environment and a policy (rollout, evaluation, isolation, a fleet) must lose, double or
reorder nothing, and must call ``reset_state`` for every row that it resets, after termination and truncation alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.toy.counting import CountingEnv, episode_length
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.contract.spec import ArraySpec

SEED, STEPS, LENGTH, ECHO = range(4)  # columns of the counting environment's state
MODULUS = 1 << 20


class AuditingPolicy:
    """Echoes ``(number of the step, seed)`` in chunks of ``horizon`` and asserts, row by row, that nothing is missing.

    State: ``seed`` and ``steps`` that each row should show next, and ``fresh``, which only ``reset_state`` raises.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon, self.version = horizon, 0
        self.resets: list[int] = []  # rows, in order

    def encode(self, obs: Observation) -> Features:
        hidden = [name for name in obs.extras if name.startswith("privileged/")]
        assert not hidden, f"the policy was shown {hidden}"
        state = np.asarray(obs.state)
        seed, steps = state[:, SEED].astype(int), state[:, STEPS].astype(int)
        assert np.array_equal(steps, obs.time), "the clock disagrees with the counter"
        assert np.array_equal(state[:, ECHO], steps * (steps + 1) / 2), "other actions arrived than were chosen"
        assert np.array_equal(
            np.asarray(obs.images["audit"])[:, 0, 0, :2].astype(int), np.stack([steps, seed % 256], 1)
        )
        return {"counters": torch.from_numpy(np.stack([seed, steps], 1)), "pixel": _pixel(obs)}

    def initial_state(self, rows: int) -> State:
        never = torch.full((rows,), -1)
        return {"seed": never, "steps": never, "fresh": torch.zeros(rows, dtype=torch.bool)}

    def reset_state(self, state: State, rows: Any) -> State:
        index = torch.as_tensor(rows)
        assert not state["fresh"][index].any(), "a row was reset twice without acting in between"
        over = state["steps"][index] == _length(state["seed"][index])
        assert (over | (state["seed"][index] < 0)).all(), "a row was reset in mid-episode"
        self.resets += index.tolist()
        fresh = state["fresh"].clone()
        fresh[index] = True
        return {**state, "fresh": fresh}

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        seed, steps = features["counters"].unbind(1)
        length = _length(seed)
        for row in range(len(seed)):
            if state["fresh"][row]:
                assert steps[row] == 0, f"row {row} was reset but is at step {int(steps[row])}"
            else:
                expected = int(state["seed"][row]), int(state["steps"][row])
                assert (int(seed[row]), int(steps[row])) == expected, f"row {row} jumped from {expected}"
        number = steps[:, None] + torch.arange(1, self.horizon + 1)
        action = torch.stack([number, seed[:, None].expand_as(number)], -1).float()
        next_features = torch.minimum(steps + self.horizon, length)
        after = {"seed": seed, "steps": next_features, "fresh": torch.zeros_like(state["fresh"])}
        out = ActionOut(action, action, -steps.double(), {"row": torch.arange(len(seed))}, self.version)
        return out, after


class SecretiveEnv(CountingEnv):
    """The counting environment with something that no policy may read."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        secret = ArraySpec((1,), "float32", 0.0, float(MODULUS))
        self.spec = replace(self.spec, extras={"privileged/seed": secret, "force": replace(secret, high=64.0)})

    def _observe(self) -> Observation:
        obs = super()._observe()
        return replace(obs, extras={"privileged/seed": obs.state[:, :1].copy(), "force": obs.state[:, 1:2].copy()})


def _pixel(obs: Observation) -> Tensor:
    return torch.as_tensor(np.asarray(obs.images["audit"])[:, 0, 0].copy())


def _length(seed: Tensor) -> Tensor:
    """Episode lengths; the seeds of these tests are below the modulus."""
    return torch.from_numpy(episode_length(seed.clamp_min(0).numpy()))
