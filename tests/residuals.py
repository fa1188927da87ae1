"""Parts of residual policies for tests: an encoder, bases with known plans, and their environments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sims.catalog import make
from sims.toy.point_mass import optimal_action
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.normalization import Affine
from vla_rl.policies.residual import ResidualConfig
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import save_folder

BIAS, HORIZON = 0.05, 4  # the biased base's error on each axis (m), its chunk length
SMALL = ResidualConfig(scale=0.5, plan=2, noise=0.2, correlation=0.5, head=HeadConfig(width=32, depth=1))
COUNTING, POINT = make("counting", num_envs=1).spec, make("point_mass", num_envs=1).spec


class StateEncoder:
    """An encoder of the raw state; it never acts."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec, self.version = spec, 0
        self.feature_sizes = {"state": spec.state.shape[0]}

    def encode(self, obs: Observation) -> Features:
        time = torch.as_tensor(obs.time)[:, None].float() / self.spec.time_limit
        return {"state": torch.as_tensor(obs.state), "time": time}

    def save_pretrained(self, folder: str | Path) -> None:
        save_folder(Path(folder), {"policy": "tests.residuals:StateEncoder", "spec": self.spec.to_json()}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec) -> StateEncoder:
        return cls(spec)


class PacingBase:
    """A base with state: chunks of three that depend on the time and on how many it chose in the episode."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec, self.version = spec, 0
        self.batch_sizes: list[int] = []  # of every call

    def encode(self, obs: Observation) -> Features:
        return {"time": torch.as_tensor(obs.time)}

    def initial_state(self, num_envs: int) -> State:
        return {"chunks": torch.full((num_envs,), -100), "last": torch.zeros(num_envs, 2)}

    def reset_state(self, state: State, env_ids: Any) -> State:
        chunks, last = state["chunks"].clone(), state["last"].clone()
        chunks[torch.as_tensor(env_ids)], last[torch.as_tensor(env_ids)] = 0, 0.0
        return {"chunks": chunks, "last": last}

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        assert mode == "eval" and (state["chunks"] >= 0).all(), "the base acts without a reset"
        self.batch_sizes.append(len(features["time"]))
        number = (features["time"] + 7 * state["chunks"])[:, None] + torch.arange(3)
        action = torch.stack([number % 11, number % 5], -1) + 0.5 * state["last"][:, None]
        after = {"chunks": state["chunks"] + 1, "last": action[:, -1]}
        return ActionOut(action, action, torch.zeros(len(action))), after


def biased(obs: Observation) -> np.ndarray:
    """float32 [E,4,2]: the optimal plan for the point mass plus ``BIAS`` at every step, adding up over the chunk."""
    position, plan = np.asarray(obs.state, np.float32), []
    for _ in range(HORIZON):
        best = optimal_action(replace(obs, state=position))
        plan.append(best + np.float32(BIAS))
        position = position + best
    return np.stack(plan, 1)


def stepping(obs: Observation) -> np.ndarray:
    """float32 [E,4,2]: the step and the seed at which an action was chosen, in the counting environment."""
    return np.stack([obs.time[:, None] + np.arange(4), obs.state[:, :1] + np.zeros(4)], -1).astype(np.float32)


def biased_base() -> FunctionPolicy:
    return FunctionPolicy(POINT, biased, "tests.residuals:biased")


def stepping_base() -> FunctionPolicy:
    return FunctionPolicy(COUNTING, stepping, "tests.residuals:stepping")


def tiny_base(spec: EnvSpec = COUNTING) -> TinyVLA:
    torch.manual_seed(0)
    config = TinyConfig(horizon=3, queries=2, condition=16, width=32, blocks=1)
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
    for parameter in policy.expert.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval()
