"""Every benchmark runs, small; how fast anything is, is not asserted."""

from __future__ import annotations

import json
import math
import time

import pytest

from tests import gpu as everything
from tests.benchmarks import gpu
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.measure import Line

EXPECTED = {
    "env_vs_async": 1,
    "env_vs_async_nested": 1,
    "env_vs_rollout": 1,
    "isolated_vs_inprocess": 2,
    "executor_jitter": 1,
    "render_vs_mujoco": 1,
    "update_stored_vs_recomputed": 2,
    "iteration_parts": 6,
    "ingest_vs_disk": 1,
    "imagined_vs_simulator": 2,
    "wan_frames": 2,
    "memory_estimate": 1,  # of three, which tests/recipes/test_memory.py estimates
    "timeline_cost": 2,
    "prefix_stored_vs_recomputed": 2,
}


def test_every_benchmark_is_tested():
    elsewhere = {"warp_vs_alone", "maniskill_vs_alone", "genesis_vs_alone"}  # tests/sims
    elsewhere |= {"inference_vs_lerobot", "ingest_vs_lerobot"}  # which want LeRobot
    assert EXPECTED.keys() | elsewhere == BENCHMARKS.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_benchmark_measures_something(name):
    rows = BENCHMARKS[name](quick=True)
    assert len(rows) == EXPECTED[name]
    assert all(name in row.command for row in rows)
    for row in rows:
        assert row.ours > 0 or row.unit == "percent"
        if row.unit == "percent":
            assert row.other is None and row.ratio is None
        else:
            better = row.other / row.ours if row.unit in ("ms", "s") else row.ours / row.other
            assert row.ratio == pytest.approx(better)


def test_a_slice_of_make_gpu_keeps_to_its_time_and_goes_on_where_it_was(tmp_path, monkeypatch):
    done = []
    parts = {
        "quick": lambda plan: done.append("quick") or [Line("quick", "", 1.0)],
        "slow": lambda plan: done.append("slow") or time.sleep(60),
        "late": lambda plan: time.sleep(60),
    }
    monkeypatch.setattr(everything, "slices", lambda: {"warp": parts, "learn": {}})
    for _ in range(2):
        report = everything.main(["warp", "--device", "cpu", "--seconds", "0.5", "--out", str(tmp_path)])
        assert report.parts == ["quick"] and [line.part for line in report.lines] == ["quick", "slow", "late"]
        assert all("not finished after" in line.note for line in report.lines[1:])
    assert done == ["quick", "slow", "slow"]


@pytest.mark.full
@pytest.mark.parametrize("part", ["warp", "learn", "imagine"])
def test_a_slice_of_make_gpu_runs_small_without_one(part, tmp_path):
    report = everything.main([part, "--device", "cpu", "--out", str(tmp_path)])
    assert report.lines and [line.note for line in report.lines if line.value is None] == []


@pytest.mark.full
def test_the_gpu_script_runs_to_its_end_without_one(tmp_path):
    report = gpu.main(["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert [line.note for line in report.lines if line.value is None] == []
    assert len(report.lines) == 2 * (2 * 3 + 2 + 3 * 2) + 2
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written["lines"]) == len(report.lines) and {"device", "date", "torch"} < written["about"].keys()
    assert (tmp_path / "gpu.md").read_text().count("\n| ") == len(report.lines) + 1
    ratios = {line.what: line.value for line in report.lines if "log ratio" in line.what}
    assert all(value <= 1e-5 * math.sqrt(4 * 80) for what, value in ratios.items() if "float32" in what)
