"""``--seeds N``: several training seeds side by side, tabled, gone on with, and never mistaken for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_rl.cli import main
from vla_rl.recipes.workers import Launcher


@pytest.mark.full
def test_several_seeds_are_trained_tabled_and_not_run_again(quick, untrained, tmp_path, capsys):
    untrained().rename(tmp_path / "policy-1")
    untrained().rename(tmp_path / "policy-2")
    out = tmp_path / "runs"
    policy = str(tmp_path / "policy-{seed}")
    command = ["train", quick, "--seeds", "2", "--policy", policy, "--out", str(out), "--rl.loop.iterations", "1"]
    main(command)
    results = json.loads((out / "results.json").read_text())
    assert [row["seed"] for row in results] == [1, 2] and all(row["rl"]["episodes"] == 4 for row in results)
    for seed in (1, 2):
        config = json.loads((out / f"seed-{seed}" / "config.json").read_text())
        assert config["policy"] == str(tmp_path / f"policy-{seed}")
    page = (out / "report.html").read_text()
    assert "seed 1" in page and "seed 2" in page and "mean (min to max)" in page and "Validation success" in page
    assert "results.json" in capsys.readouterr().err
    finished = (out / "seed-2" / "summary.json").stat().st_mtime_ns
    main(command)
    assert (out / "seed-2" / "summary.json").stat().st_mtime_ns == finished


def test_each_seed_has_arguments_of_its_own_and_is_launched_once(quick, tmp_path, monkeypatch, complaint):
    launched: list[list[str]] = []

    def launch(launcher, arguments, log) -> int:
        launched.append(list(arguments))
        _leave(Path(arguments[arguments.index("--out") + 1]), len(launched))
        return 0

    monkeypatch.setattr(Launcher, "launch", launch)
    out, policy = tmp_path / "runs", str(tmp_path / "policy-{seed}")
    command = ["train", quick, "--seeds", "2", "--processes", "1", "--policy", policy, "--out", str(out)]
    main(command)
    expected = [
        ["train", quick, "--out", f"{out}/seed-{i}", "--seed", str(i), "--policy", policy.format(seed=i)]
        for i in (1, 2)
    ]
    assert launched == expected
    assert [row["seed"] for row in json.loads((out / "results.json").read_text())] == [1, 2]
    main(command)
    assert launched == expected, "nothing is run again"
    assert "cannot stand for this one; choose another --out" in complaint(*command, "--rl.loop.iterations", "2")


def test_returns_of_several_seeds_are_tabled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vla_rl.recipes.compare.run_sweep", lambda out, groups, processes: _finished(groups["train"]))
    main(["train", "gym.py:cartpole", "--seeds", "2", "--out", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "Mean return, each seed with its own interval; 64 episodes each" in page and "Validation mean return" in page
    assert "return  11 [10, 12]  12 [11, 13]  11.5 (11 to 12)" in " ".join(capsys.readouterr().err.splitlines())


def _finished(cells):
    """Leave what a run of a task without a rule of success leaves."""
    for number, cell in enumerate(cells, 1):
        _leave(cell.out, number)


def _leave(out: Path, number: int) -> None:
    out.mkdir(parents=True)
    found = {"mean": 10 + number, "low": 9 + number, "high": 11 + number, "episodes": 64}
    (out / "config.json").write_text("{}")
    (out / "summary.json").write_text(json.dumps({"return": found, "seconds": {"rl": 1.0}}))
    line = {"stage": "rl", "step": 1, "elapsed_s": 1.0, "env/steps_total": 100.0, "eval/score": 10.0}
    (out / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_a_mistake_is_refused_before_anything_runs(quick, complaint, tmp_path):
    assert "no field '--sed'" in complaint("train", quick, "--seeds", "2", "--sed", "3", "--out", tmp_path / "runs")
    assert "is no number" in complaint("train", quick, "--seeds", "two")
    assert "give both at least 1" in complaint("train", quick, "--seeds", "0")
    assert not (tmp_path / "runs").exists()
