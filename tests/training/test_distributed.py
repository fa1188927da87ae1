"""Two real processes on gloo: they end with the weights of one, and a whole command runs in them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.commands import save_untrained
from tests.patience import PATIENCE
from tests.toys import FlowToy, bandit, columns, seeded
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import OneProcess, Reducer
from vla_rl.contract.errors import UserError
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import SeedStream, WindowConfig
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.training.distributed import SummedCounters, current_reducer, torchrun_processes

ROOT = Path(__file__).parents[2]
DECISIONS, UPDATES = 90, 3


def learn(reducer: Reducer, part: slice) -> dict[str, torch.Tensor]:
    """The weights after ``UPDATES`` updates from these columns, in double precision."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    policy = FlowToy(sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4), width=16)
    config = PPOConfig(epochs=2, minibatch=24, lr=1e-2, critic_warmup=0, target_kl=0.02, stop_kl=2.0)
    ppo = PPO(policy, policy.trainable(), ValueCritic({"state": 1}, width=16), config, seeded(0), reducer)
    for i in range(UPDATES):
        ppo.update(columns(bandit(policy, DECISIONS, seeded(i)), part))
    torch.set_default_dtype(torch.float32)
    return {
        name: item.detach().clone() for name, item in [*policy.state_dict().items(), *ppo.critic.state_dict().items()]
    }


def torchrun(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_two_processes_end_with_the_weights_of_one(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.test_distributed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    whole = learn(OneProcess(), slice(None))
    for name, expected in whole.items():
        assert torch.equal(one[name], two[name])
        torch.testing.assert_close(one[name], expected, rtol=1e-9, atol=1e-9)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.full
@pytest.mark.parametrize("name", ["paid", "residual"])
def test_two_processes_that_were_killed_end_as_undisturbed_ones(name, tmp_path):
    """One has written its part of the state of iteration 3 when it is killed, so both go on from iteration 2.

    Off-policy, each has its own decisions in its replay.
    """
    policy, whole, killed = save_untrained(tmp_path / "untrained"), tmp_path / "whole", tmp_path / "killed"
    recipe = [f"{ROOT}/tests/recipes/quick.py:{name}", "--policy", str(policy), "--rl.loop.iterations", "5"]
    recipe += ["--rl.algorithm.critic-warmup", "0"] if name == "paid" else []
    done = torchrun("-m", "vla_rl.cli", "train", *recipe, "--out", str(whole))
    assert done.returncode == 0, done.stderr
    assert torchrun("-m", "tests.training.killed", "3", "train", *recipe, "--out", str(killed)).returncode != 0
    steps = [sorted(path.name for path in (folder / "state").iterdir()) for folder in (killed, killed / "process-1")]
    assert steps == [["00000001", "00000002"], ["00000002", "00000003"]]
    done = torchrun("-m", "vla_rl.cli", "train", "--resume", str(killed))
    assert done.returncode == 0, done.stderr
    for file in ("checkpoints/best/model.safetensors", "state/00000005/tensors.safetensors"):
        for process in ("", "process-1/"):
            one, other = ((run / f"{process}{file}").read_bytes() for run in (whole, killed))
            assert one == other, f"{process}{file}"
    best = [
        load_file(f / "model.safetensors") for f in (whole / "checkpoints/best", whole / "process-1/checkpoints/best")
    ]
    assert all(torch.equal(item, best[1][key]) for key, item in best[0].items())
    metrics = [list(map(json.loads, (f / "metrics.jsonl").open())) for f in (whole, whole / "process-1")]
    assert [line["env/steps_total"] for line in metrics[0]] == [line["env/steps_total"] for line in metrics[1]]
    start = load_file(policy / "model.safetensors")
    learnt = any(not torch.equal(start[key], item) for key, item in best[0].items() if key in start)
    assert learnt if name == "paid" else metrics[0][-1]["critic/steps"] > 0 < metrics[0][-1]["replay/size"]


def test_rows_and_groups_are_shared_equally_or_not_at_all():
    assert WindowConfig(6, 5).split(2) == WindowConfig(3, 5) and WindowConfig(6, 5).split(1) == WindowConfig(6, 5)
    assert GroupConfig(16, 8, 4, 64, 32).split(4) == GroupConfig(4, 8, 1, 16, 8)
    with pytest.raises(UserError, match="cannot be shared equally by 4 processes"):
        WindowConfig(6, 5).split(4)
    with pytest.raises(UserError, match="cannot be shared equally by 3 processes"):
        GroupConfig(16, 8, 4, 64).split(3)


def test_processes_draw_seeds_that_together_are_those_of_one():
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


if __name__ == "__main__":  # two processes, forked after what takes longest, the imports
    torch.optim.Adam([torch.zeros(1)])
    other = os.fork()
    os.environ["RANK"] = "0" if other else "1"
    with torchrun_processes():
        group = current_reducer()
        part = slice(0, 30) if group.rank == 0 else slice(30, None)
        save_file(learn(group, part), Path(sys.argv[1]) / f"{group.rank}.safetensors")
        kept = weakref.ref(dist.group.WORLD)
    if kept() is not None:
        sys.exit("the process group outlives destroy_process_group, and its threads abort a process that ends")
    sys.exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
