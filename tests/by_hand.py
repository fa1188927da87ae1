"""Off-policy learners with numbers that can be computed by hand: one policy, one batch, small critics."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import torch
from torch import nn

from tests.toys import seeded
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.batch import Transitions
from vla_rl.contract.policy import CriticAction
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig

CONFIG = ResidualTD3Config(
    batch=32, utd_ratio=0.5, learning_starts=10, critic_warmup=6, policy_delay=2, lr=1e-2, critic_lr=1e-3
)


class Line(nn.Module):
    """A deterministic policy: every action is ``w`` times the state, unclipped."""

    version = 0

    def __init__(self, w: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), w))

    def unused(self, *given):
        raise AssertionError("these tests never act")

    encode = initial_state = reset_state = act = unused

    def rsample(self, features, generator):
        return CriticAction(features["state"] * self.w, torch.zeros(len(features["state"])))

    def critic_action(self, features, sample, executed):
        return executed.flatten(1)


def batch(size: int = 40, seed: int = 0, **changes) -> Transitions:
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    generator = seeded(seed)
    parts = {
        "features": {"state": normal(size, 2), "base_action": normal(size, 2)},
        "sample": torch.full((size, 1, 2), torch.nan),
        "executed": normal(size, 1, 2),
        "count": torch.ones(size, dtype=torch.long),
        "reward": normal(size),
        "discount": torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.8),
        "next_features": {"state": normal(size, 2), "base_action": normal(size, 2)},
        "returns": normal(size),
        "intervened": torch.zeros(size, dtype=torch.bool),
        **{name: torch.zeros(size, dtype=torch.long) for name in ("version", "task", "robot")},
    }
    return Transitions(**{**parts, **changes})


class Recorded:
    """A replay buffer that always samples the same batch."""

    def __init__(self, found: Transitions | None = None) -> None:
        self.found, self.added = found or batch(), 0

    def __len__(self) -> int:
        return len(self.found.reward)

    def add(self, rollout) -> int:
        return 0

    def sample(self, size, generator):
        return self.found

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


_ONE_AT_A_TIME = Lock()  # threads that stand for processes share the generator that modules are initialised from


def build(policy=None, replay=None, num_critics: int = 4, kind=ResidualTD3, reducer=None, **changes):
    policy = policy or Line()
    with _ONE_AT_A_TIME:
        torch.manual_seed(0)
        critic = QEnsemble({"state": 2}, 2, num_critics, HeadConfig(16, 1))
    config = replace(CONFIG, **changes)
    replay = Recorded() if replay is None else replay
    return kind(policy, dict(policy.named_parameters()), critic, replay, config, seeded(5), reducer)


def drift(module: nn.Module, seed: int = 3) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(seed)))


def learnt(critic: nn.Module) -> list[nn.Parameter]:
    """The critics' weights without their input statistics."""
    return [parameter for name, parameter in critic.named_parameters() if not name.startswith("inputs.")]
