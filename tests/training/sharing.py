"""What each of torchrun's processes does in ``test_distributed.py``: learn from its columns of a bandit's rollouts."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.toys import FlowToy, bandit
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.training.distributed import current_reducer, torchrun_processes

DECISIONS, UPDATES = 90, 3


def learn(reducer: Reducer, columns: slice) -> dict[str, torch.Tensor]:
    """The weights after ``UPDATES`` updates from these columns, in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4), width=16)
    config = PPOConfig(minibatch=24, lr=1e-2, critic_warmup=0, target_kl=0.02, stop_kl=2.0)
    ppo = PPO(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), config, seeded(0), reducer)
    for i in range(UPDATES):
        ppo.update(cut(bandit(policy, DECISIONS, seeded(i)), columns))
    torch.set_default_dtype(torch.float32)
    return {
        name: item.detach().clone() for name, item in [*policy.state_dict().items(), *ppo.critic.state_dict().items()]
    }


def cut(experience: Rollout, columns: slice) -> Rollout:
    """Some columns of a rollout of one decision each."""

    def of(value: Any) -> Any:
        return {name: of(item) for name, item in value.items()} if isinstance(value, dict) else value[:, columns]

    names = (
        "features",
        "sample",
        "aux",
        "logprob",
        "reward",
        "valid",
        "intervened",
        "terminated",
        "truncated",
        "success",
        "version",
    )
    return replace(experience, **{name: of(getattr(experience, name)) for name in names})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    with torchrun_processes():
        group = current_reducer()
        part = slice(0, 30) if group.rank == 0 else slice(30, None)
        save_file(learn(group, part), Path(sys.argv[1]) / f"{group.rank}.safetensors")
        kept = weakref.ref(dist.group.WORLD)
    if kept() is not None:
        sys.exit("the process group outlives destroy_process_group, and its threads abort a process that ends")
