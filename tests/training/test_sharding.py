"""Two gloo processes that share the weights of a tiny SmolVLA learn what one process learns; what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.test_tiny import observations
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import seeded
from tests.training.sharding_toy import Learning, learn
from tests.training.test_distributed import torchrun
from vla_rl.algorithms.decisions import clip_gradients
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.inference import Compiled
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import holder, write_gathered
from vla_rl.training.sharding import Lockstep

CLOSE = 1e-6  # of a weight tensor's norm, in float32


@pytest.mark.full
@pytest.mark.parametrize("trains", ["expert", "all", "lora"])
def test_two_processes_that_share_the_weights_learn_what_one_learns(trains: str, tmp_path: Path) -> None:
    """With unequal shares of the data, one of them empty, and an observation that one of them encodes alone.

    Resumed in the middle, they end the same, bit for bit; the checkpoint is an ordinary one.
    """
    done = torchrun("-m", "tests.training.sharding_toy", str(tmp_path), trains)
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


def test_nothing_of_sharding_is_imported_where_nothing_is_shared() -> None:
    """It takes half as long as torch itself, in every process that is started."""
    code = """
import sys
import vla_rl.cli.train, vla_rl.experience.worker, vla_rl.recipes.improve, vla_rl.recipes.off_policy
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


def test_gradients_are_clipped_by_their_joint_norm() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 1.0) == 5.0
    assert parameters[0].grad[0] == pytest.approx(0.6) and parameters[1].grad[0] == pytest.approx(0.8)


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


def test_a_network_that_does_not_run_operation_by_operation_cannot_be_shared() -> None:
    with pytest.raises(UserError, match="set inference to Eager"):
        tiny_vla(SmolVLA, VLAOptions(horizon=2, inference=Compiled("eager"))).act_through(lambda acting: acting)
