"""A flow policy for the bandit, as the base of latent-noise policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.toys import FlowToy, bandit_reward, seeded
from vla_rl.contract.env import ArraySpec, EnvSpec

SPEC = EnvSpec(
    name="bandit",
    images={},
    state=ArraySpec((1,), "float32", -1.0, 1.0),
    action=ArraySpec((2,), "float32", -1.0, 1.0),
    tasks=("be good",),
    control_dt=0.1,
    time_limit=1,
    max_chunk=1,
)


class ToyBase(FlowToy):
    """``FlowToy`` with the attributes of a base."""

    spec, feature_sizes = SPEC, {"state": 1}

    @property
    def config(self) -> Any:
        return SimpleNamespace(horizon=1, sampler=self.sampler)

    def save_pretrained(self, folder: Any) -> None:
        raise NotImplementedError


def toy_base(std: float = 0.5) -> ToyBase:
    """Imitates actions of N(0, std^2) in all states."""
    torch.manual_seed(0)
    base = ToyBase()
    base.pretrain(std=std)
    return base


def deployed(policy: Any, mode: str = "eval") -> float:
    """Mean reward of a policy on the bandit, 0 at best."""
    state = torch.linspace(-1, 1, 512)[:, None]
    out, _ = policy.act({"state": state}, {}, mode, seeded(9))
    return float(bandit_reward(state, out.action[:, 0]).mean())
