"""Sweeps over a Ray cluster of two nodes here: what they end with is what they end with on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.patience import wait_until
from tests.recipes.test_sweep import _runs
from vla_rl.cli.main import main

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def address():
    """Of two nodes with a processor each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    yield found.address
    found.shutdown()


@pytest.fixture
def sweep(untrained, tmp_path):
    """``sweep(name, *options)`` trains three seeds in the folder ``name``."""
    policy, config = str(untrained()), f"{Path(__file__).parent / 'quick.py'}:paid"

    def run(name: str, *options: str) -> Path:
        out = tmp_path / name
        given = ["--policy", policy, "--out", str(out), "--rl.loop.iterations", "12"]
        main(["train", config, "--seeds", str(len(SEEDS)), *given, *options])
        return out

    return run


@pytest.mark.full
def test_a_sweep_ends_as_here_also_when_an_actor_is_killed_in_the_middle(sweep, address, tmp_path):
    here = _found(sweep("here"))
    assert _found(sweep("ray", "--engine", "ray", "--address", address)) == here
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_actor, tmp_path / "killed" / "seed-2")
        killed = sweep("killed", "--engine", "ray", "--address", address)
        orphan = killing.result()
    assert _found(killed) == here
    assert not _runs(orphan)
    assert "resum" in (killed / "seed-2.log").read_text() or (killed / "seed-2.log").stat().st_size


def _kill_actor(run: Path) -> int:
    """Kill the process whose child trains in ``run``, after its first validations; returns the child's id."""
    rows = run / "metrics.jsonl"
    wait_until(lambda: rows.exists() and rows.read_text().count("\n") >= 3)
    pid = int((run / "run.lock").read_text())
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not _runs(pid))
    return pid


@pytest.mark.full
def test_too_many_at_a_time_are_refused(address, complaint, quick, tmp_path):
    asked = ["--seeds", "3", "--processes", "3", "--out", tmp_path / "runs", "--engine", "ray", "--address", address]
    assert "has 2 CPU and 3 workers of 1 need 3" in complaint("train", quick, *asked)


def _found(out: Path) -> list[object]:
    """Of every seed its summary, without seconds, and the hashes of its checkpoints."""
    found: list[object] = []
    for seed in SEEDS:
        run = out / f"seed-{seed}"
        summary = json.loads((run / "summary.json").read_text())
        found.append({name: value for name, value in summary.items() if not name.startswith("seconds")})
        weights = sorted((run / "checkpoints").rglob("*.safetensors"))
        found.append({str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in weights})
        assert weights
    return found
