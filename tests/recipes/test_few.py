"""``vla-rl few`` end to end on tiny runs; areas, gains and verdicts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vla_rl.cli.main import main
from vla_rl.contract.config import from_json, to_json
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.few.report import best_of, write_page
from vla_rl.recipes.few.study import Curve, FewStudy
from vla_rl.training.tracking import RunFolder

CONFIG = str(Path(__file__).parent / "quick_few.py")


def curve(method: str, *counts: tuple[int, ...], task: str = "lift") -> Curve:
    """Of ten scenes as many successes as ``counts`` say, seed by seed, at 0, 100 and 200 episodes."""
    scenes = np.arange(10)
    outcomes = {seed: tuple(scenes < n for n in found) for seed, found in enumerate(counts, 1)}
    return Curve(task, method, (0, 100, 200), outcomes)


def test_the_area_is_the_mean_success_while_learning_and_the_lowest_that_of_the_worst_seed():
    found = curve("residual_one", (4, 2, 6), (6, 6, 8))
    # Means .5, .4, .7 at 0, 100 and 200: trapezoids of .45 and .55.
    assert found.area() == pytest.approx(0.5)
    assert found.lowest() == pytest.approx(-0.2)
    assert best_of([curve("a", (4, 2, 6)), curve("b", (4, 5, 5)), curve("c", (4, 4, 4))]).method == "b"


def test_a_gain_is_paired_by_scene_and_seed():
    one, other = curve("selection", (4, 8, 9), (5, 6, 7)), curve("residual_one", (4, 5, 9), (5, 5, 5))
    assert one.gain(other, 1).mean == pytest.approx((0.3 + 0.1) / 2)
    assert one.gain(other, 2).mean == pytest.approx((0.0 + 0.2) / 2)
    nothing = one.gain(one, 1)
    assert nothing.mean == 0.0 and -0.2 < nothing.low < 0.0 < nothing.high < 0.2, "twenty pairs are few"
    assert one.gain(other, 1).low > 0 and one.gain(other, 1).high < 0.45
    with pytest.raises(KeyError):  # another seed's scenes are no pairs
        one.gain(curve("residual_one", (4, 5, 9)), 1)


def test_a_use_is_worth_building_only_where_the_perfect_model_gains_enough(tmp_path):
    alone = curve("residual_one", (4, 5, 5))
    latent = curve("latent_selection", (4, 9, 9))
    for method, counts, verdict in (("selection", (4, 5, 6), "yes"), ("branches", (4, 5, 5), "no")):
        write_page(
            tmp_path / f"{method}.html",
            [alone, curve(method, counts), latent],
            ["residual_one"],
            ["latent_selection"],
            0.05,
        )
        page = (tmp_path / f"{method}.html").read_text()
        assert [one for one in ("yes", "no") if f">{one}</td>" in page] == [verdict]
    page = (tmp_path / "selection.html").read_text()
    assert all(text in page for text in ("+10.0", "lowest", "real episodes", "learnt from the same episodes"))


@pytest.mark.full
def test_every_method_is_tested_at_every_milestone_and_nothing_runs_twice(tmp_path, capsys, complaint):
    out = tmp_path / "few"
    command = ["few", "--config", CONFIG, "--tasks", "lift", "--alone", "residual_one", "--seeds", "2"]
    command += ["--uses", "selection", "--learnt", "--out", str(out)]
    main(command)
    rows = json.loads((out / "results.json").read_text())
    assert all(row.keys() == {"task", "method", "episodes", "seed", "success", "low", "high"} for row in rows)
    methods = ("residual_one", "selection")
    expected = {("base", 0)} | {(method, episodes) for method in methods for episodes in (4, 8)}
    assert sorted((row["method"], row["episodes"]) for row in rows) == sorted(expected)
    for method in methods:
        found = json.loads((out / "lift" / f"{method}-2" / "summary.json").read_text())["rows"]
        assert [row["episodes"] for row in found] == [0, 4, 8] and all(len(row["outcomes"]) == 6 for row in found)
        assert found[0]["outcomes"] == rows_of(out, "residual_one")[0]["outcomes"], "the base is the base"
        assert found[1]["played"] >= 4 and found[2]["played"] > found[1]["played"]
    page = (out / "report.html").read_text()
    assert "the simulator as the model" in page and "vla-rl few" in page
    before = (out / "lift" / "selection-2" / "summary.json").stat().st_mtime_ns
    main(command)
    assert (out / "lift" / "selection-2" / "summary.json").stat().st_mtime_ns == before
    assert "no config function 'imitate_push'" in complaint(*command, "--tasks", "push")


def rows_of(out: Path, method: str) -> list[dict]:
    return json.loads((out / "lift" / f"{method}-2" / "summary.json").read_text())["rows"]


@pytest.mark.parametrize("task", ["lift", "place"])
def test_every_method_of_the_study_is_a_config_that_a_run_can_be_resumed_from(task):
    study = FewStudy()
    for name in (*study.alone, *study.uses, *study.learnt):
        config = load_config(f"{study.config}:{task}_{name}")
        assert from_json(json.loads(json.dumps(to_json(config)))) == config
        assert config.episodes == (100, 200, 400) and config.scenes == 512 and config.env.name == task


@pytest.mark.full
def test_a_run_that_was_stopped_begins_anew(tmp_path, untrained, monkeypatch):
    given = ["train", f"{CONFIG}:lift_residual_one", "--policy", str(untrained()), "--out", str(tmp_path / "run")]
    logged = RunFolder.log

    def stopped(folder, stage, step, metrics) -> None:
        logged(folder, stage, step, metrics)
        if step >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "log", stopped)
    with pytest.raises(SystemExit):
        main(given)
    begun = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    monkeypatch.undo()
    main(["train", "--resume", str(tmp_path / "run")])
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert begun and steps == sorted(set(steps)) and steps[-1] >= 8
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rows"][-1]["episodes"] == 8


def test_milestones_that_do_not_rise_are_refused(complaint, tmp_path, untrained):
    given = ["train", f"{CONFIG}:lift_residual_one", "--policy", str(untrained()), "--out", str(tmp_path / "run")]
    assert "no rising milestones" in complaint(*given, "--episodes", "8", "4")
