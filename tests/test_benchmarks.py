"""The benchmarks run and write what they should; how fast anything is, is not asserted."""

from __future__ import annotations

import json
import math
import sys
import time
from functools import cache

import pytest
import torch

from tests.benchmarks import gpu, ingest_lerobot, vla_inference, vla_sizes
from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.imagination import PUBLISHED, call, random_call, wan
from tests.benchmarks.measure import Contender, Row, interleave
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
SLOW = {"memory_estimate", "imagined_vs_simulator", "isolated_vs_inprocess"}


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


def test_results_are_written(tmp_path, monkeypatch):
    rows = {"render_vs_mujoco": lambda quick: quick_rows("render_vs_mujoco")}
    monkeypatch.setattr("tests.benchmarks.__main__.BENCHMARKS", rows)
    main([], quick=True, results=tmp_path / "bench" / "results.json")
    written = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert set(written) == {"machine", "rows", "missing"} and written["missing"] == {}
    assert set(written["rows"][0]) >= {"name", "ours", "other", "ratio", "unit", "command"}


def fast(quick: bool) -> list[Row]:
    return [Row("fast", 2.0, 1.0, 2.0, "steps/s", "command")]


def endless(quick: bool) -> list[Row]:
    while True:
        time.sleep(0.01)


def interrupted(quick: bool) -> list[Row]:
    raise KeyboardInterrupt


def failing(quick: bool) -> list[Row]:
    raise ZeroDivisionError


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


@pytest.mark.parametrize(("last", "error"), [(interrupted, SystemExit), (failing, ZeroDivisionError)])
def test_what_was_measured_stays_when_the_rest_is_interrupted_or_fails(last, error, tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    monkeypatch.setattr("tests.benchmarks.__main__.BENCHMARKS", {"one": fast, "last": last, "never": endless})
    with pytest.raises(error) as stop:
        main([], results=results)
    assert error is not SystemExit or stop.value.code == 130
    assert [row["name"] for row in json.loads(results.read_text())["rows"]] == ["fast"]


def test_an_unknown_benchmark_gets_help():
    with pytest.raises(SystemExit, match="did you mean 'env_vs_async'"):
        main(["env_vs_asink"])


def test_contenders_take_turns_and_the_first_round_does_not_count():
    calls = []
    contenders = {
        name: Contender(lambda n=name: calls.append(n), lambda n=name: calls.append(n.upper())) for name in "ab"
    }
    seconds = interleave(contenders, repeats=2)
    assert calls == ["A", "a", "B", "b"] * 3
    assert set(seconds) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "billions", "latent"),
    [
        pytest.param("5B", (5.00, 0.705), (48, 16, 16), marks=pytest.mark.full),
        ("1.3B", (1.42, 0.127), (16, 32, 32)),
    ],
)
@pytest.mark.full
def test_the_shapes_of_wan_are_those_that_are_published(name, billions, latent):
    """By their numbers of weights, counted without allocating any; a whole call goes through them."""
    video = wan(PUBLISHED[name], 256, torch.device("meta"))
    counts = [sum(item.numel() for item in part.parameters()) / 1e9 for part in (video.network, video.vae)]
    assert counts == [pytest.approx(count, rel=0.01) for count in billions] and video.latent == latent
    assert all(item.dtype == torch.bfloat16 for item in video.parameters())
    assert call(video, random_call(video, 256, 2)).shape == (2, 8, 3, 256, 256)


def test_without_a_gpu_the_large_model_is_said_to_be_missing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["wan_frames"]) == []
    assert "wan_frames: not measured, it needs a GPU" in capsys.readouterr().out


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


def test_a_decision_of_ours_takes_turns_with_one_of_another_process(monkeypatch):
    monkeypatch.setattr(vla_inference, "_gap", lambda contenders, path: 0.0)
    found = vla_inference.rows((sys.executable, "-c", ZEROS), ("tiny",), 1)
    assert [row.name for row in found] == ["inference_vs_lerobot_tiny_1", "inference_vs_lerobot_tiny_8"]
    assert all(row.ours > 0 and row.ratio == pytest.approx(row.ours / row.other) for row in found)


def test_a_side_that_ends_is_said():
    with pytest.raises(AssertionError, match="the other side ended"):
        vla_inference.rows((sys.executable, "-c", "pass"), ("tiny",), 1)


def test_without_lerobot_its_row_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vla_inference, "PACKAGES", tmp_path / "nowhere")
    assert main(["inference_vs_lerobot"]) == []
    said = " ".join(capsys.readouterr().out.split())
    assert f"inference_vs_lerobot: not run: LeRobot is not in .cache/lerobot; install it once with {INSTALL}" in said


def test_the_sizes_are_those_that_are_said():
    count = sum(item.numel() for item in vla_sizes.QUARTER.build().parameters())
    assert count == pytest.approx(25.5e6, rel=0.01)


@pytest.mark.full
def test_the_gpu_script_runs_to_its_end_without_one(tmp_path):
    report = gpu.main(["--small", "--device", "cpu", "--out", str(tmp_path)])
    assert [line.note for line in report.lines if line.value is None] == []
    assert len(report.lines) == 2 * (2 + 2 + 2 + 2) + 2
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written["lines"]) == len(report.lines) and {"device", "date", "torch"} < written["about"].keys()
    assert (tmp_path / "gpu.md").read_text().count("\n| ") == len(report.lines) + 1
    ratios = {line.what: line.value for line in report.lines if "log ratio" in line.what}
    assert all(value <= 1e-5 * math.sqrt(4 * 80) for what, value in ratios.items() if "float32" in what)


def test_a_part_that_fails_or_is_too_slow_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    def fails(plan: gpu.Plan, report: gpu.Report) -> None:
        raise RuntimeError("no kernel | for this")

    def works(plan: gpu.Plan, report: gpu.Report) -> None:
        report.add(gpu.Line("works", 1.0, "ms"))

    parts = [("one", 9.0, fails), ("two", 0.2, lambda plan, report: endless(True)), ("three", 9.0, works)]
    monkeypatch.setattr(gpu, "parts_of", lambda plan: parts)
    report = gpu.main(["--small", "--device", "cpu", "--out", str(tmp_path)])
    notes = ["failed: RuntimeError: no kernel / for this", "not finished after 0 s", ""]
    assert [line.note for line in report.lines] == notes
    monkeypatch.setattr(gpu, "WHOLE", 0.0)
    assert {line.note for line in gpu.main(["--small", "--device", "cpu", "--out", str(tmp_path)]).lines} == {
        "no time was left"
    }


def test_without_a_gpu_the_gpu_script_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "torch sees no GPU, so nothing can run on 'cuda'; try --small --device cpu." in capsys.readouterr().err


def test_without_lerobot_ingestion_is_not_compared_and_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ingest_lerobot, "PACKAGES", tmp_path / "nowhere")
    assert main(["ingest_vs_lerobot"]) == []
    assert "ingest_vs_lerobot: not run: LeRobot is not in .cache/lerobot" in capsys.readouterr().out


def test_steps_pass_from_a_robots_arrays_to_the_learners(tmp_path):
    ours = ingest_lerobot._Ours(tmp_path, ingest_lerobot._steps(), 5)
    for _ in range(2):
        ours.send()
    ours.pack()
    ours.send_packed()
    assert ours._ledger.position == 15
    assert 5_000 < ours.bytes_per_step < 30_000
    ours.close()
