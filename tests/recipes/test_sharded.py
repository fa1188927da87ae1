"""Whole runs of processes that share the weights of their policy: resumed after a kill, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sims.catalog import make
from tests.recipes import quick
from tests.training.test_distributed import torchrun
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.training.sharding import sharing

CONFIG = str(Path(quick.__file__))


def test_sharded_without_torchrun_is_refused(untrained, complaint) -> None:
    with pytest.raises(UserError, match=r"this is one process.* torchrun --nproc-per-node N"):
        sharing(1)
    assert "this is one process" in complaint("train", f"{CONFIG}:improve", "--policy", untrained(), "--sharded")


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("residual", [], "cannot be cut into shards"),
        ("improve", [], "TinyVLA has no network"),
        ("improve", ["--evaluation.processes", "2"], "hold no weights"),
    ],
)
def test_what_two_processes_cannot_share_is_said(recipe, options, said, untrained, tmp_path: Path) -> None:
    command = ["--policy", str(untrained()), "--out", str(tmp_path / "run"), "--sharded", *options]
    done = torchrun("-m", "vla_rl.cli", "train", f"{CONFIG}:{recipe}", *command)
    assert done.returncode != 0 and said in done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_sharded_run_is_that_of_processes_with_all_weights_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Episodes of lift are truncated after five steps, so that processes encode unequally often."""
    policy, env = tmp_path / "untrained", make("lift", num_envs=1)
    torch.manual_seed(0)
    options = VLAOptions(horizon=5, sampler=FlowSampler(FlowSde(0.5), LastStep(), 4))
    SmolVLA.new(env.spec, Affine.from_bounds(env.spec.state), None, options).save_pretrained(policy)
    env.close()
    learning = ["--rl.loop.iterations", "4", "--rl.algorithm.critic-warmup", "0", "--rl.algorithm.micro-batch", "3"]
    recipe = ["train", f"{CONFIG}:paid", "--policy", str(policy), *learning]
    runs = {name: tmp_path / name for name in ("replicated", "whole", "killed", "collected")}
    collected = ["--sharded", "--rl.loop.collectors", "2"]  # by processes that hold whole policies
    for name, options in (("replicated", []), ("whole", ["--sharded"]), ("collected", collected)):
        done = torchrun("-m", "vla_rl.cli", *recipe, "--out", str(runs[name]), *options)
        assert done.returncode == 0, done.stderr
    stopped = torchrun("-m", "tests.training.killed", "2", *recipe, "--out", str(runs["killed"]), "--sharded")
    assert stopped.returncode != 0
    done = torchrun("-m", "vla_rl.cli", "train", "--resume", str(runs["killed"]))
    assert done.returncode == 0, done.stderr
    weights = {name: load_file(run / "checkpoints" / "best" / "model.safetensors") for name, run in runs.items()}
    start = load_file(policy / "model.safetensors")
    learnt = weights.pop("collected")
    assert sum(not torch.equal(start[name], item) for name, item in learnt.items()) > 20
    assert sum(not torch.equal(start[name], item) for name, item in weights["whole"].items()) > 20
    for name, item in weights["whole"].items():
        assert torch.equal(item, weights["killed"][name]), name
        assert (item - weights["replicated"][name]).norm() <= 1e-5 * item.norm(), name
