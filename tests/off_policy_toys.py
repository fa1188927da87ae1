"""Toys with known answers for tests of off-policy algorithms: a state encoder, a recorded bandit, scripted policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sims.catalog import make
from sims.toy.point_mass import optimal_return
from tests.toys import Stateless, bandit_reward, rollout, seeded
from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.policy import ActionOut, CriticAction, Features, encode_observation
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.feed_forward import GaussianPolicy, SquashedConfig, SquashedPolicy
from vla_rl.policies.heads import HeadConfig

SMALL = HeadConfig(width=32)


class StateEncoder(GaussianPolicy):
    """An encoder of proprioception alone."""

    @property
    def feature_sizes(self) -> dict[str, int]:
        return {"state": self.spec.state.shape[0]}


def env_spec(dims: int = 2, low: float = -1.0, high: float = 1.0, chunk: int = 4) -> EnvSpec:
    """A spec with one state entry and ``dims`` action entries."""
    state, action = ArraySpec((1,), "float32", -1.0, 1.0), ArraySpec((dims,), "float32", low, high)
    return EnvSpec("bandit", {}, state, action, ("choose",), control_dt=0.1, time_limit=8, max_chunk=chunk)


def squashed(spec: EnvSpec, seed: int = 0, **numbers: Any) -> SquashedPolicy:
    torch.manual_seed(seed)
    return SquashedPolicy(StateEncoder(spec), SquashedConfig(head=SMALL, **numbers))


def critics(policy: SquashedPolicy, num_critics: int = 2, seed: int = 0) -> QEnsemble:
    torch.manual_seed(seed)
    return QEnsemble(policy.feature_sizes, policy.horizon * policy.spec.action_dim, num_critics, SMALL)


def recorded(num_envs: int, generator: torch.Generator, width: float = 1.0) -> Rollout:
    """Decisions in the bandit of ``toys.py``, uniform within ``width`` of 0."""
    state = 2 * torch.rand(num_envs, 1, generator=generator) - 1
    action = width * (2 * torch.rand(num_envs, 1, 2, generator=generator) - 1)
    out = ActionOut(action, torch.zeros_like(action), torch.zeros(num_envs))
    return rollout({"state": torch.stack([state, state])}, out, bandit_reward(state, action[:, 0])[None, :, None])


def regret(policy: Any) -> tuple[float, float]:
    """Mean shortfall from the optimal return of the point mass, and success, of the deployed policy on 64 new seeds."""
    env, env_ids = make("point_mass", num_envs=64), np.arange(64)
    obs, state = env.reset(env_ids, 10_000 + env_ids), policy.reset_state(policy.initial_state(64), env_ids)
    shortfall = optimal_return(obs.state)
    for _ in range(env.spec.time_limit):
        features, state = encode_observation(policy, obs, state, seeded())
        out, state = policy.act(features, state, "eval", seeded())
        step = env.step(out.action.numpy())
        obs, shortfall = step.obs, shortfall - step.reward[:, 0]
    return float(shortfall.mean()), float(step.success.mean())


class Scripted(Stateless):
    """A ``ReparametrisedPolicy`` whose decision is given: ``features["a"]`` [B,A] and ``features["logp"]`` [B]."""

    def rsample(self, features: Features, generator: Any) -> CriticAction:
        return CriticAction(features["a"], features["logp"])

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        return executed.flatten(1)


class Table(nn.Module):
    """Critics whose values are ``features["q"]`` [B,K], plus the action's first entry times ``slope``."""

    def __init__(self, num_critics: int, slope: float = 0.0) -> None:
        super().__init__()
        self.num_critics, self.slope, self.bias = num_critics, slope, nn.Parameter(torch.zeros(num_critics))

    def forward(self, features: Features, action: Tensor) -> Tensor:
        return (features["q"] + self.bias).T + self.slope * action[:, 0]


def transitions(**parts: Any) -> Transitions:
    """One transition of zeros, except for ``parts``."""
    one: dict[str, Any] = {
        "features": {},
        "sample": torch.zeros(1, 1, 1),
        "executed": torch.zeros(1, 1, 1),
        "count": torch.ones(1, dtype=torch.long),
        "reward": torch.zeros(1),
        "discount": torch.zeros(1),
        "next_features": {},
        "returns": torch.full((1,), -torch.inf),
        "intervened": torch.zeros(1, dtype=torch.bool),
        **{name: torch.zeros(1, dtype=torch.long) for name in ("version", "task", "robot")},
    }
    return Transitions(**{**one, **parts})
