"""The benchmarks run and write what they should; how fast anything is, is not asserted."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.imagination import PUBLISHED, call, random_call, wan
from tests.benchmarks.measure import Contender, Row, interleave

EXPECTED = {
    "env_vs_async": 1,
    "env_vs_async_nested": 1,
    "env_vs_rollout": 1,
    "isolated_vs_inprocess": 2,
    "render_vs_mujoco": 1,
    "update_stored_vs_recomputed": 2,
    "iteration_parts": 6,
    "replay_add": 1,
    "ppo_vs_rsl_rl": 1,
    "imagined_vs_simulator": 2,
    "wan_frames": 2,
    "memory_estimate": 3,
}


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
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


def test_parts_of_an_iteration_are_all_of_it():
    assert sum(row.ours for row in BENCHMARKS["iteration_parts"](quick=True)) == pytest.approx(100)


def test_results_are_written(tmp_path, monkeypatch):
    rows = {"render_vs_mujoco": BENCHMARKS["render_vs_mujoco"]}
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
    ("name", "billions", "latent"), [("5B", (5.00, 0.705), (48, 16, 16)), ("1.3B", (1.42, 0.127), (16, 32, 32))]
)
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
