"""``vla-rl compare imagination``: which methods share a world model, how each is evaluated, and the final table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vla_rl.cli.train import compare
from vla_rl.recipes.compare import Cell
from vla_rl.recipes.imagine.comparison import ImagineStudy

SHARING = "no_uncertainty", "with_keyframes", "with_resampling"
SUCCESS = {"lift": 0.7, "with_coevolution": 0.6, "residual_td3": 0.9}


@pytest.fixture
def asked(monkeypatch) -> list[list[Cell]]:
    """The cells in the order of their runs; each writes at once the files that a real one writes after minutes."""
    turns: list[list[Cell]] = []

    def run(cells: list[Cell], processes: int, what: str) -> None:
        turns.append(cells)
        for cell in cells:
            _leave(cell.out)

    monkeypatch.setattr("vla_rl.recipes.compare.run_cells", run)
    return turns


def _leave(out: Path) -> None:
    method, _, seed = out.name.rpartition("-")
    success = SUCCESS.get(method, 0.5) + int(seed) / 100
    rate = {"success": success, "low": success - 0.1, "high": success + 0.1, "episodes": 512}
    found = {"seconds": {"world": 100.0, "rl": 20.04}, "validation": rate}
    if method == "residual_td3":
        found |= {"rl": rate, "episodes": 1000}
    elif method != "imitation":
        gain = {"mean": success - 0.5, "low": success - 0.55, "high": success - 0.45, "mcnemar_p": 0.01}
        before = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 512}
        found |= {"imagined_rl": rate, "simulator_episodes": 1375, "imitation": before, "gain": gain}
    out.mkdir(parents=True)
    (out / "summary.json").write_text(json.dumps(found))
    validation = {"eval/score": 0.5, "eval/score_low": 0.4, "eval/score_high": 0.6, "eval/episodes": 256}
    (out / "metrics.jsonl").write_text(
        json.dumps({"stage": "rl", "step": 0, "rollout/episodes": 0, **validation}) + "\n"
    )


def test_methods_that_train_the_same_world_model_share_it(asked, tmp_path):
    compare(["imagination", "--out", str(tmp_path)])
    imitation, own, rest = asked
    assert {cell.out.name for cell in imitation} == {f"imitation-{seed}" for seed in (1, 2, 3)}
    assert {cell.out.name for cell in own} == {f"{method}-{seed}" for method in SUCCESS for seed in (1, 2, 3)}
    assert {cell.out.name for cell in rest} == {f"{method}-{seed}" for method in SHARING for seed in (1, 2, 3)}
    for cell in own + rest:
        method, _, seed = cell.out.name.rpartition("-")
        given = dict(zip(cell.arguments[::2], cell.arguments[1::2], strict=True))
        assert cell.config == f"imagine.py:{method}" and given["--seed"] == seed
        assert given["--policy"] == str(tmp_path / f"imitation-{seed}" / "checkpoints" / "imitation")
        assert given.get("--plan.init-from") == (str(tmp_path / f"lift-{seed}") if method in SHARING else None)
        assert ("--demonstrations" in given) == (method == "residual_td3")


def test_the_device_is_that_of_every_run(asked, tmp_path):
    compare(["imagination", "--out", str(tmp_path / "study"), "--device", "cuda:1"])
    cells = [cell for cells in asked for cell in cells]
    assert len(cells) == 21
    for cell in cells:
        assert cell.arguments[cell.arguments.index("--device") + 1] == "cuda:1"


def test_every_method_is_tabled_over_its_seeds(asked, tmp_path):
    compare(["imagination", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in results[::3]] == list(ImagineStudy().methods)
    assert [row["seed"] for row in results] == [1, 2, 3] * 6
    found = {(row["method"], row["seed"]): row for row in results}
    assert found["lift", 2]["success"] == 0.72 and found["lift", 2]["simulator_episodes"] == 1375
    assert found["residual_td3", 1]["simulator_episodes"] == 1000 + 256, "validation is paid for as well"
    assert found["with_keyframes", 3]["seconds"] == 120.0
    page = (tmp_path / "report.html").read_text()
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert cells[1] == ["imitation", *["50.0% [40.0,\N{NO-BREAK SPACE}60.0]"] * 3, "50.0% (50.0% to 50.0%)"], (
        "imitation is reported on the test scenes"
    )
    assert cells[2] == [
        "lift",
        "71.0% [61.0,\N{NO-BREAK SPACE}81.0]",
        "72.0% [62.0,\N{NO-BREAK SPACE}82.0]",
        "73.0% [63.0,\N{NO-BREAK SPACE}83.0]",
        "72.0% (71.0% to 73.0%)",
    ]
    won = {row[0]: row[1:] for row in cells[8:]}
    assert won["lift"] == [
        "+21.0 [16.0,\N{NO-BREAK SPACE}26.0]",
        "+22.0 [17.0,\N{NO-BREAK SPACE}27.0]",
        "+23.0 [18.0,\N{NO-BREAK SPACE}28.0]",
        "1375",
        "120",
    ]
    assert won["residual td3"] == ["–", "–", "–", "1256", "120"]


def test_where_no_imagined_rollout_was_played_imitation_is_reported_by_its_validation(asked, tmp_path):
    compare(["imagination", "--out", str(tmp_path), "--methods", "residual_td3"])
    assert "51.0% [41.0,\N{NO-BREAK SPACE}61.0]" in (tmp_path / "report.html").read_text()
