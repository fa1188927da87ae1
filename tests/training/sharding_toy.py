"""What each of torchrun's processes does in ``test_sharding.py``: PPO of a tiny SmolVLA that they share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.policies.test_tiny import observations
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import rollout, seeded
from tests.training.sharing import cut
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Reducer
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.options import TrainAll, TrainExpert, TrainLoRA, Trains, VLAOptions
from vla_rl.training.checkpoint import read_state, save_state
from vla_rl.training.distributed import HOST, torchrun_processes
from vla_rl.training.sharding import ShardedGroup

UPDATES, ROWS = 4, 14
CUTS = (5, ROWS, 0, 9)  # of the rows, how many process 0 has in each update
TRAINS: dict[str, Trains] = {"expert": TrainExpert(), "all": TrainAll(), "lora": TrainLoRA(2, 4.0, within="all")}


class Learning:
    """PPO of the policy, which the processes of a ``ShardedGroup`` share."""

    def __init__(self, reducer: Reducer, trains: str) -> None:
        sampler = FlowSampler(FlowSde(0.5), LastStep(), 2)
        self.policy = tiny_vla(SmolVLA, VLAOptions(horizon=2, sampler=sampler, trains=TRAINS[trains]))
        if isinstance(reducer, ShardedGroup):
            reducer.shard(self.policy, HOST)
        config = PPOConfig(
            minibatch=7, micro_batch=3, epochs=2, critic_warmup=0, lr=1e-4, target_kl=0.1, stop_kl=1e9
        )  # fmt: skip
        critic = ValueCritic({**self.policy.feature_sizes, "time": 1}, width=16)
        self.reducer, self.metrics = reducer, dict[str, float]()
        self.ppo = PPO(self.policy, self.policy.trainable(), critic, config, seeded(0), reducer)

    def update(self, number: int) -> None:
        """One update from rows that do not depend on the weights' rounding, of which each process has its own."""
        obs, draw = observations(ROWS, seed=number), seeded(number)
        features = self.policy.encode(obs)
        if self.reducer.rank:  # as where an episode was truncated
            self.policy.encode(obs.select(slice(0, 2)))
        out, _ = self.policy.act(features, {}, "sample", draw)
        reward = torch.randn(1, ROWS, 2, generator=draw)
        pair = {name: torch.stack((item, item)) for name, item in features.items()}
        whole = rollout(pair, out, reward, version=torch.full((1, ROWS), self.policy.version))
        first = CUTS[number % len(CUTS)]
        own = {1: slice(None), 2: slice(0, first) if self.reducer.rank == 0 else slice(first, None)}
        self.metrics = self.ppo.update(cut(whole, own[self.reducer.size]))

    def weights(self) -> dict[str, Tensor]:
        """All that is learnt, whole."""
        named = {**self.policy.trainable(), **{f"critic.{k}": v for k, v in self.ppo.critic.named_parameters()}}
        return {name: whole(item.detach()).clone() for name, item in named.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def learn(reducer: Reducer, trains: str) -> Learning:
    """All updates, one after the other."""
    learning = Learning(reducer, trains)
    for number in range(UPDATES):
        learning.update(number)
    return learning


def interrupted(reducer: Reducer, trains: str, folder: Path) -> Learning:
    """The same with a state in ``folder`` after half of them, from which a new learner goes on."""
    first = Learning(reducer, trains)
    for number in range(UPDATES // 2):
        first.update(number)
    save_state(folder, 1, first.ppo.state_dict())
    second = Learning(new_group(), trains)
    second.ppo.load_state_dict(read_state(folder / "00000001"))
    for number in range(UPDATES // 2, UPDATES):
        second.update(number)
    return second


def new_group() -> ShardedGroup:
    return ShardedGroup(smallest=200)


def shares(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """How many numbers there are, and how many of them this process holds."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
    return {"whole": sum(p.numel() for p in parameters.values()), "held": sum(p.numel() for p in held)}


def main(out: Path, trains: str) -> None:
    with torchrun_processes():
        group = new_group()
        done = learn(group, trains)
        save_file(done.weights(), out / f"whole-{group.rank}.safetensors")
        done.policy.save_pretrained(out / f"checkpoint-{group.rank}")
        again = interrupted(new_group(), trains, out / f"state-{group.rank}").weights()
        save_file(again, out / f"resumed-{group.rank}.safetensors")
        moments = [v for s in done.ppo.optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
        numbers = torch.tensor([*shares(dict(done.policy.network.named_parameters())).values(), len(moments)])
        save_file({"numbers": numbers}, out / f"shares-{group.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
