"""Sweeps and suites over a Ray cluster of two nodes here: what they end with is what they end with on this machine."""

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
from tests.recipes.quick_suite import quick, save_policy
from tests.recipes.test_compare import _runs
from vla_rl.cli import main
from vla_rl.evaluation.results import EPISODES
from vla_rl.recipes.suite_run import SuiteRun
from vla_rl.recipes.workers import RayEngine, on_engine

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
def test_a_suite_is_played_byte_for_byte_as_here(address, tmp_path):
    policy = save_policy(tmp_path / "checkpoint")
    SuiteRun(quick(), policy, tmp_path / "here").run()
    with on_engine(RayEngine(address)):
        SuiteRun(quick(), policy, tmp_path / "ray", num_envs=3, processes=2).run()
    assert (tmp_path / "ray" / EPISODES).read_bytes() == (tmp_path / "here" / EPISODES).read_bytes()
    videos = [sorted(path.name for path in (tmp_path / name / "videos").iterdir()) for name in ("here", "ray")]
    assert videos[0] == videos[1] and videos[0]


@pytest.mark.full
def test_a_sweep_ends_as_here_also_when_an_actor_is_killed(sweep, address, tmp_path):
    here = _found(sweep("here"))
    assert _found(sweep("ray", "--engine", "ray", "--address", address)) == here
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_actor, tmp_path / "killed" / "seed-2")
        killed = sweep("killed", "--engine", "ray", "--address", address)
        before = killing.result()
    assert _found(killed) == here
    assert (killed / "seed-2" / "metrics.jsonl").read_text().splitlines()[: len(before)] == before  # with its times


def _kill_actor(run: Path) -> list[str]:
    """Kill the process whose child trains in ``run``, and the child with it; returns the first metrics."""
    wait_until(lambda: len(_lines(run)) >= 6)
    pid = int((run / "run.lock").read_text())
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not _runs(pid))
    assert not (run / "summary.json").exists()
    return _lines(run)[:4]


def _lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.full
def test_too_many_at_a_time_are_refused(address, complaint, quick, tmp_path):
    asked = ["--seeds", "3", "--out", tmp_path / "runs", "--engine", "ray", "--address", address]
    assert "has 2 CPU and 3 workers of 1 need 3" in complaint("train", quick, *asked, "--processes", "3")
    assert "has 0 GPU and 2 workers of 0.5 need 1" in complaint("train", quick, *asked, "--gpus", "0.5")


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
