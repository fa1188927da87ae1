"""The benchmarks run and write what they should; how fast anything is, is not asserted."""

from __future__ import annotations

import json
import math
import sys
import time
from functools import cache

import pytest

from tests.benchmarks import gpu, ingest_lerobot, vla_inference
from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.measure import Row
from tests.benchmarks.vla_inference import INSTALL

EXPECTED = {
    "env_vs_async": 1,
    "env_vs_async_nested": 1,
    "env_vs_rollout": 1,
    "isolated_vs_inprocess": 2,
    "executor_jitter": 1,
    "render_vs_mujoco": 1,
    "update_stored_vs_recomputed": 2,
    "iteration_parts": 6,
    "replay_add": 1,
    "ingest_vs_disk": 1,
    "imagined_vs_simulator": 2,
    "wan_frames": 2,
    "memory_estimate": 1,  # of three, which tests/recipes/test_memory.py estimates
    "timeline_cost": 2,
    "prefix_stored_vs_recomputed": 2,
}
# They take seconds; isolation, streams and estimates have tests of their own.
SLOW = {
    "memory_estimate",
    "imagined_vs_simulator",
    "isolated_vs_inprocess",
    "prefix_stored_vs_recomputed",
    "wan_frames",
}


def test_every_benchmark_is_tested():
    elsewhere = {"warp_vs_alone", "maniskill_vs_alone", "genesis_vs_alone"}  # tests/sims
    elsewhere |= {"inference_vs_lerobot", "ingest_vs_lerobot"}  # below
    assert EXPECTED.keys() | elsewhere == BENCHMARKS.keys()


@cache
def quick_rows(name: str) -> list[Row]:
    return BENCHMARKS[name](quick=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in sorted(EXPECTED)]
)
def test_every_benchmark_measures_something(name):
    rows = quick_rows(name)
    assert len(rows) == EXPECTED[name]
    assert all(name in row.command for row in rows)
    for row in rows:
        assert row.ours > 0 or row.unit == "percent"
        if row.unit == "percent":
            assert row.other is None and row.ratio is None
        else:
            better = row.other / row.ours if row.unit in ("ms", "s") else row.ours / row.other
            assert row.ratio == pytest.approx(better)


def test_parts_of_an_iteration_are_all_of_it():
    assert sum(row.ours for row in quick_rows("iteration_parts")) == pytest.approx(100)


def fast(quick: bool) -> list[Row]:
    return [Row("fast", 2.0, 1.0, 2.0, "steps/s", "command")]


def endless(quick: bool) -> list[Row]:
    while True:
        time.sleep(0.01)


def test_every_row_is_written_when_it_is_there_and_a_budget_ends_what_is_too_slow(tmp_path, monkeypatch, capsys):
    results, snapshots = tmp_path / "results.json", []

    def read_results(quick: bool) -> list[Row]:
        snapshots.append(json.loads(results.read_text()))
        return fast(quick)

    monkeypatch.setattr("tests.benchmarks.__main__.BENCHMARKS", {"one": fast, "two": endless, "three": read_results})
    assert len(main([], results=results, budget=0.2)) == 2
    assert len(snapshots[0]["rows"]) == 1 and snapshots[0]["missing"] == {"two": "not finished after 0.2 s"}
    written = json.loads(results.read_text())
    assert len(written["rows"]) == 2 and written["missing"] == snapshots[0]["missing"]
    said = capsys.readouterr().out
    assert said.index("1/3 one") < said.index("fast") < said.index("2/3 two, at most 0.2 s") < said.index("3/3 three")


# Decides on the other side: zeros for every action.
ZEROS = """
import sys, numpy as np
from pathlib import Path
print("ready", flush=True)
for path in map(Path, iter(lambda: sys.stdin.readline().strip(), "")):
    np.save(path.with_suffix(".npy"), np.zeros((len(np.load(path)["state"]), 10, 7)))
    print("done", flush=True)
"""


def test_two_sides_that_decide_differently_are_not_compared():
    with pytest.raises(AssertionError, match="the two decide differently"):
        vla_inference.rows((sys.executable, "-c", ZEROS), ("tiny",), 1)


@pytest.mark.parametrize(("name", "module"), [("inference", vla_inference), ("ingest", ingest_lerobot)])
def test_without_lerobot_a_row_says_how_to_install_it(name, module, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "PACKAGES", tmp_path / "nowhere")
    assert main([f"{name}_vs_lerobot"]) == []
    said = " ".join(capsys.readouterr().out.split())
    assert f"not run: LeRobot is not in .cache/lerobot; install it once with {INSTALL}" in said


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


def test_steps_pass_from_a_robots_arrays_to_the_learners(tmp_path):
    ours = ingest_lerobot._Ours(tmp_path, ingest_lerobot._steps(), 5)
    for _ in range(2):
        ours.send()
    ours.pack()
    ours.send_packed()
    assert ours._ledger.position == 15
    assert 5_000 < ours.bytes_per_step < 30_000
    ours.close()
