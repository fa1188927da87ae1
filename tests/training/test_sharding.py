"""Two gloo processes that share the weights of a tiny SmolVLA learn what one process learns; what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.policies.test_tiny import observations
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import columns, rollout, seeded
from tests.training.test_distributed import torchrun
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import OneProcess, Reducer
from vla_rl.contract.errors import UserError
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.inference import Compiled
from vla_rl.policies.vla.options import TrainAll, TrainExpert, TrainLoRA, Trains, VLAOptions
from vla_rl.pretrained import holder, write_gathered
from vla_rl.training.checkpoint import read_state, save_state
from vla_rl.training.distributed import HOST, torchrun_processes
from vla_rl.training.sharding import Lockstep, ShardedGroup

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
        self.metrics = self.ppo.update(columns(whole, own[self.reducer.size]))

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


CLOSE = 1e-6  # of a weight tensor's norm, in float32


@pytest.mark.full
@pytest.mark.parametrize("trains", ["expert", "all", "lora"])
def test_two_processes_sharing_weights_learn_what_one_learns(trains: str, tmp_path: Path) -> None:
    """With unequal shares of the data, one of them empty, and an observation that one of them encodes alone.

    Resumed in the middle, they end the same, bit for bit; the checkpoint is an ordinary one.
    """
    done = torchrun("-m", "tests.training.test_sharding", str(tmp_path), trains)
    assert done.returncode == 0, done.stderr
    both = [load_file(tmp_path / f"whole-{rank}.safetensors") for rank in (0, 1)]
    resumed = [load_file(tmp_path / f"resumed-{rank}.safetensors") for rank in (0, 1)]
    expected, start = learn(OneProcess(), trains), Learning(OneProcess(), trains).weights()
    moved = 0
    for name, one in expected.weights().items():
        assert torch.equal(both[0][name], both[1][name]), name
        assert torch.equal(both[0][name], resumed[0][name]) and torch.equal(both[0][name], resumed[1][name]), name
        assert (both[0][name] - one).norm() <= CLOSE * one.norm(), name
        moved += bool((one - start[name]).norm() > 1e3 * CLOSE * one.norm())
    assert moved > 0.8 * len(start)
    _check_shares(tmp_path)
    _check_checkpoint(tmp_path, both[0])


@pytest.mark.full
def test_nothing_of_sharding_is_imported_where_nothing_is_shared() -> None:
    """It takes half as long as torch itself, in every process that is started."""
    code = """
import sys
import vla_rl.cli.train, vla_rl.experience.worker, vla_rl.recipes.improve, vla_rl.recipes.trainers
from vla_rl.contract.tracker import is_shard
assert not is_shard(1)
sys.exit("torch.distributed.tensor" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _check_shares(folder: Path) -> None:
    """Each process holds little more than half of the weights; the optimizer's moments are shards too."""
    for rank in (0, 1):
        whole, held, moments = load_file(folder / f"shares-{rank}.safetensors")["numbers"].tolist()
        assert held < 0.56 * whole and moments >= 20


def _check_checkpoint(folder: Path, learnt: dict[str, torch.Tensor]) -> None:
    """Written by process 0 alone, and loaded as any other."""
    assert not (folder / "checkpoint-1").exists()
    policy = SmolVLA.from_pretrained(folder / "checkpoint-0")
    for name, item in policy.trainable().items():
        assert torch.equal(item, learnt[name]), name
    assert torch.isfinite(policy.act(policy.encode(observations()), {}, "eval", seeded(0))[0].action).all()


def test_gathered_files_are_as_those_of_safetensors(tmp_path: Path) -> None:
    """Of whole tensors of every kind; those of shards are read above."""
    tensors = {
        "half": torch.randn(3, 2).bfloat16(),
        "transposed": torch.randn(2, 5).T,
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
    }
    write_gathered(tmp_path / "ours", tensors)
    save_file({name: item.contiguous() for name, item in tensors.items()}, tmp_path / "theirs")
    found, wanted = (load_file(tmp_path / name) for name in ("ours", "theirs"))
    assert found.keys() == wanted.keys() and holder(tensors) is None
    for name, item in wanted.items():
        assert torch.equal(found[name], item) and found[name].dtype == item.dtype


class Unit(torch.nn.Module):
    """A part that notes when it is gathered and when it computes."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: int) -> int:
        self.log.append(self.name)
        return x

    def unshard(self) -> None:
        self.log.append(f"({self.name})")

    def reshard(self) -> None: ...


class Root(torch.nn.Module):
    def forward(self, call, *given):
        return call(*given)


def test_who_has_another_call_or_none_gathers_for_those_who_have() -> None:
    log: list[str] = []
    first, second = Unit("a", log), Unit("b", log)
    others = [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]

    def total(wants: torch.Tensor) -> torch.Tensor:
        return wants + torch.tensor(others.pop(0), dtype=torch.float64)

    lockstep = Lockstep(Root(), [first, second], total)
    assert lockstep.call("encode", lambda: second(first(1))) == 1
    assert lockstep.call("condition", lambda: second(2)) == 2
    assert lockstep.call("velocity", lambda: first(3)) == 3  # before it, another process encodes
    assert log == ["a", "b", "b", "(a)", "(b)", "a"]
    log.clear()
    lockstep.meet()  # the others condition and encode first
    assert log == ["(b)", "(a)", "(b)"] and not others


def test_a_compiled_network_cannot_be_shared() -> None:
    with pytest.raises(UserError, match="set inference to Eager"):
        tiny_vla(SmolVLA, VLAOptions(horizon=2, inference=Compiled("eager"))).act_through(lambda acting: acting)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
