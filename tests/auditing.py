"""A policy that audits its own experience: it asserts the rules of the counting environment.

The code between environment and policy (rollout, evaluation, isolation, a fleet) must not lose, repeat or reorder
anything, and must call ``reset_state`` for every environment it resets, after termination and truncation alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.toy.counting import CountingEnv, episode_length
from vla_rl.contract.env import ArraySpec, Observation
from vla_rl.contract.policy import ActionOut, Features, Mode, State

SEED, STEPS, LENGTH, ECHO = range(4)  # columns of the counting environment's state
MODULUS = 1 << 20


class AuditingPolicy:
    """Echoes ``(number of the step, seed)`` in chunks of ``horizon`` and asserts that none is missing.

    State: the ``seed`` and ``steps`` expected next in each environment, and ``fresh``, which only ``reset_state`` sets.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon, self.version = horizon, 0
        self.resets: list[int] = []  # env_ids, in order
        self.extras: list[set[str]] = []  # names of all that came with an observation

    def encode(self, obs: Observation) -> Features:
        self.extras.append(set(obs.extras))
        hidden = [name for name in obs.extras if name.startswith("privileged/")]
        assert not hidden, f"the policy received {hidden}"
        state = np.asarray(obs.state)
        seed, steps = state[:, SEED].astype(int), state[:, STEPS].astype(int)
        assert np.array_equal(steps, obs.time), "the clock disagrees with the counter"
        assert np.array_equal(state[:, ECHO], steps * (steps + 1) / 2), "executed actions differ from chosen ones"
        assert np.array_equal(
            np.asarray(obs.images["audit"])[:, 0, 0, :2].astype(int), np.stack([steps, seed % 256], 1)
        )
        return {"counters": torch.from_numpy(np.stack([seed, steps], 1)), "pixel": _pixel(obs)}

    def initial_state(self, num_envs: int) -> State:
        never = torch.full((num_envs,), -1)
        return {"seed": never, "steps": never, "fresh": torch.zeros(num_envs, dtype=torch.bool)}

    def reset_state(self, state: State, env_ids: Any) -> State:
        index = torch.as_tensor(env_ids)
        assert not state["fresh"][index].any(), "an environment was reset twice without acting in between"
        over = state["steps"][index] == _length(state["seed"][index])
        assert (over | (state["seed"][index] < 0)).all(), "an environment was reset in mid-episode"
        self.resets += index.tolist()
        fresh = state["fresh"].clone()
        fresh[index] = True
        return {**state, "fresh": fresh}

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        seed, steps = features["counters"].unbind(1)
        length = _length(seed)
        fresh, expected = state["fresh"], torch.stack([state["seed"], state["steps"]], 1)
        assert not steps[fresh].any(), f"environments were reset but are at the steps {steps[fresh].tolist()}"
        jumped = (features["counters"] != expected).any(1) & ~fresh
        assert not jumped.any(), f"environments jumped from {expected[jumped].tolist()}"
        number = steps[:, None] + torch.arange(1, self.horizon + 1)
        action = torch.stack([number, seed[:, None].expand_as(number)], -1).float()
        next_steps = torch.minimum(steps + self.horizon, length)
        after = {"seed": seed, "steps": next_steps, "fresh": torch.zeros_like(state["fresh"])}
        out = ActionOut(action, action, -steps.double(), {"row": torch.arange(len(seed))}, self.version)
        return out, after


class PrivilegedEnv(CountingEnv):
    """The counting environment with a privileged extra, which no policy may read."""

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
