"""The benchmarks run and write what they should; how fast anything is, is not asserted."""

from __future__ import annotations

import json

import pytest
import torch

from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.imagination import PUBLISHED, call, some_call, wan
from tests.benchmarks.measure import Contender, interleave

EXPECTED = {
    "env_vs_async": 1,
    "env_vs_async_nested": 1,
    "env_vs_rollout": 1,
    "render_vs_mujoco": 1,
    "update_stored_vs_recomputed": 2,
    "iteration_parts": 6,
    "replay_add": 1,
    "ppo_vs_rsl_rl": 1,
    "imagined_vs_simulator": 2,
    "wan_frames": 2,
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
    assert set(written) == {"machine", "rows"}
    assert set(written["rows"][0]) >= {"name", "ours", "other", "ratio", "unit", "command"}


def test_an_unknown_benchmark_gets_help():
    with pytest.raises(SystemExit, match="did you mean 'env_vs_async'"):
        main(["env_vs_asink"])


def test_contenders_take_turns_and_the_first_round_does_not_count():
    seen = []
    contenders = {
        name: Contender(lambda n=name: seen.append(n), lambda n=name: seen.append(n.upper())) for name in "ab"
    }
    seconds = interleave(contenders, repeats=2)
    assert seen == ["A", "a", "B", "b"] * 3
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
    assert call(video, some_call(video, 256, 2)).shape == (2, 8, 3, 256, 256)


def test_without_a_gpu_the_large_model_is_said_to_be_missing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["wan_frames"]) == []
    assert "wan_frames: not measured, it needs a GPU" in capsys.readouterr().out
