"""PPO learners of a small flow policy, shared by tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.toys import FlowToy, seeded
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde

SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)
CONFIG = PPOConfig(
    epochs=4,
    minibatch=64,
    lr=3e-3,
    critic_lr=3e-3,
    lr_bounds=(1e-5, 1e-2),
    critic_warmup=0,
    target_kl=0.1,
)


def learner(policy=None, kind=PPO, reducer=None, **changes) -> PPO:
    torch.manual_seed(0)
    policy = policy or FlowToy(sampler=SDE, width=16)
    critic = ValueCritic({"state": 1}, width=16)
    return kind(policy, policy.trainable(), critic, replace(CONFIG, **changes), seeded(), reducer)


class Watching(PPO):
    """Keeps what goes into the losses."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gaps, self.drawn, self.steps = [], [], []

    def policy_loss(self, row, new):
        self.gaps.append(float((new.logprob - row.logprob).detach().abs().max()))
        return super().policy_loss(row, new)

    def _minibatches(self, size):
        drawn = list(super()._minibatches(size))
        self.drawn.append([index.clone() for index, _ in drawn])
        yield from drawn

    def _step(self, optimizer, losses, trained):
        self.steps.append("+".join(trained))
        return super()._step(optimizer, losses, trained)
