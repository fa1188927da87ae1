"""Two real processes on gloo: they end with the weights of one, and a whole command runs in them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import save_untrained
from tests.patience import PATIENCE
from tests.toys import FlowToy, bandit, seeded
from tests.training.sharing import learn
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import SeedStream, WindowConfig
from vla_rl.training.distributed import SummedCounters, current_reducer

ROOT = Path(__file__).parents[2]


def torchrun(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_two_processes_end_with_the_weights_of_one(tmp_path):
    done = torchrun("-m", "tests.training.sharing", str(tmp_path))
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    whole = learn(OneProcess(), slice(None))
    for name, expected in whole.items():
        assert torch.equal(one[name], two[name])
        torch.testing.assert_close(one[name], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_a_whole_run_in_two_processes(tmp_path):
    """Same weights in both, summed counters, half of the environments in each."""
    policy, out = save_untrained(tmp_path / "untrained"), tmp_path / "run"
    learning = ["--rl.loop.iterations", "3", "--rl.algorithm.critic-warmup", "0"]
    config = str(ROOT / "tests" / "recipes" / "quick.py") + ":improve"
    done = torchrun("-m", "vla_rl.cli", "train", config, "--policy", str(policy), "--out", str(out), *learning)
    assert done.returncode == 0, done.stderr
    folders = (out, out / "process-1")
    best = {
        hashlib.sha256((f / "checkpoints" / "best" / "model.safetensors").read_bytes()).hexdigest() for f in folders
    }
    assert len(best) == 1
    metrics = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    assert [line["env/steps_total"] for line in metrics[0]] == [line["env/steps_total"] for line in metrics[1]]
    assert [line["rollout/decisions"] for line in metrics[0][1:]] == [8.0] * 3  # 4 environments, 2 decisions
    assert (out / "state").exists() and (out / "process-1" / "state").exists()


@pytest.mark.full
def test_an_off_policy_run_in_two_processes_is_resumed_bit_for_bit(tmp_path):
    """Each has its own decisions in its replay, both the same weights; the one that goes on ends as the other."""
    policy, config = save_untrained(tmp_path / "untrained"), str(ROOT / "tests" / "recipes" / "quick.py")
    recipe = [f"{config}:residual", "--policy", str(policy), "--rl.loop.iterations"]
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for out, iterations in ((whole, "6"), (halved, "6")):
        runner = ("-m", "vla_rl.cli") if out is whole else ("-m", "tests.training.killed", "3")
        done = torchrun(*runner, "train", *recipe, iterations, "--out", str(out))
        assert (done.returncode == 0) == (out is whole), done.stderr
    done = torchrun("-m", "vla_rl.cli", "train", "--resume", str(halved))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["critic/steps"] > 0 and lines[-1]["replay/size"] > 0
    for name in ("checkpoints/best/model.safetensors", "state/00000006/tensors.safetensors"):
        for process in ("", "process-1/"):
            one, other = ((run / f"{process}{name}").read_bytes() for run in (whole, halved))
            assert one == other, f"{process}{name}"
    best = [(whole / f"{process}checkpoints/best/model.safetensors").read_bytes() for process in ("", "process-1/")]
    assert best[0] == best[1]


@pytest.mark.full
def test_two_processes_that_were_killed_while_saving_end_with_the_weights_of_undisturbed_ones(tmp_path):
    """One has written its part of the state of iteration 3 when it is killed, so both go on from iteration 2."""
    policy = save_untrained(tmp_path / "untrained")
    learning = ["--rl.loop.iterations", "5", "--rl.algorithm.critic-warmup", "0"]
    recipe = [str(ROOT / "tests" / "recipes" / "quick.py") + ":paid", "--policy", str(policy), *learning]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = torchrun("-m", "vla_rl.cli", "train", *recipe, "--out", str(whole))
    assert done.returncode == 0, done.stderr
    assert torchrun("-m", "tests.training.killed", "3", "train", *recipe, "--out", str(killed)).returncode != 0
    steps = [sorted(path.name for path in (folder / "state").iterdir()) for folder in (killed, killed / "process-1")]
    assert steps == [["00000001", "00000002"], ["00000002", "00000003"]]
    done = torchrun("-m", "vla_rl.cli", "train", "--resume", str(killed))
    assert done.returncode == 0, done.stderr
    start, best = (load_file(f / "model.safetensors") for f in (policy, whole / "checkpoints" / "best"))
    assert any(not torch.equal(start[name], item) for name, item in best.items())
    for name in ("", "process-1/"):
        for file in ("checkpoints/best/model.safetensors", "state/00000005/tensors.safetensors"):
            one, other = ((run / f"{name}{file}").read_bytes() for run in (whole, killed))
            assert one == other, f"{name}{file}"


def test_rows_and_groups_are_shared_equally_or_not_at_all():
    assert WindowConfig(6, 5).split(2) == WindowConfig(3, 5) and WindowConfig(6, 5).split(1) == WindowConfig(6, 5)
    assert GroupConfig(16, 8, 4, 64, 32).split(4) == GroupConfig(4, 8, 1, 16, 8)
    with pytest.raises(UserError, match="cannot be shared equally by 4 processes"):
        WindowConfig(6, 5).split(4)
    with pytest.raises(UserError, match="cannot be shared equally by 3 processes"):
        GroupConfig(16, 8, 4, 64).split(3)


def test_processes_draw_different_seeds_that_together_are_those_of_one():
    drawn = [[next(stream) for _ in range(3)] for stream in (SeedStream(10, 16, 2), SeedStream(11, 16, 2))]
    assert drawn == [[10, 12, 14], [11, 13, 15]]


def test_counters_are_summed_and_seconds_averaged():
    class Source:
        def next(self):
            return replace(bandit(FlowToy(), 2, seeded(0)), info={"env/steps": 3.0, "time/env_s": 2.0})

    class Twice(OneProcess):
        size = 2

        def sum(self, values):
            return 2 * values

    assert SummedCounters(Source(), current_reducer()).next().info == {"time/env_s": 2.0, "env/steps": 3.0}
    assert SummedCounters(Source(), Twice()).next().info == {"time/env_s": 2.0, "env/steps": 6.0}
