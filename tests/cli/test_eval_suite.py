"""``vla-rl eval --suite``: a table per task, the files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.quick_suite import quick, save_policy
from vla_rl.cli import main

SUITE = f"{Path(__file__).parents[1] / 'recipes' / 'quick_suite.py'}:quick"


def test_a_suite_is_played_and_tabled(capsys, tmp_path):
    policy, out = save_policy(tmp_path / "policy"), tmp_path / "out"
    main(["eval", "--suite", SUITE, "--policy", policy, "--out", str(out), "--episodes", "4", "--videos", "0"])
    said = " ".join(capsys.readouterr().err.split())
    assert "wide" in said and "of 4 (" in said and " all " in said and "of 8" in said
    assert {path.name for path in out.iterdir()} >= {"episodes.csv", "latency.csv", "results.json", "report.html"}
    main(["eval", f"--suite={SUITE}", "--policy", policy, "--out", str(tmp_path / "one"), "--tasks", "narrow"])
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    assert list(results["tasks"]) == ["narrow"] and results["protocol"] != quick().protocol


def test_the_expert_of_the_tabletop(capsys, tmp_path):
    given = ["--tasks", "lift", "--episodes", "3", "--videos", "1", "--seeds", "validation"]
    main(["eval", "--suite", "tabletop", "--policy", "expert", "--out", str(tmp_path), *given])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tasks"]["lift"]["success"] == 1.0 and results["suite"]["first_seed"] == 1_000_000_000
    assert (tmp_path / "videos" / "lift-1000000000.mp4").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--suite", "tabletop", "--out", "x"), "--policy is missing"),
        (("--suite", "tabletop", "--policy", "expert"), "--out is missing"),
        (("--suit", "tabletop", "--policy", "expert", "--out", "x"), "eval has no option '--suit'"),
        (("--suite", "tabeltop", "--policy", "expert", "--out", "x"), "did you mean 'tabletop'?"),
        (("--suite", "tabletop", "--polisy", "expert", "--out", "x"), "did you mean '--policy'?"),
        (("--suite", "tabletop", "--policy", "nowhere", "--out", "{}/x", "--tasks", "lift"), "has no config.json"),
        (("--suite", "tabletop", "--policy", "expert", "--out", "{}/x", "--num-envs", "0"), "num_envs is 0"),
        (("--suite", "tabletop", "--policy", "expert", "--out", "{}/x", "--processes", "0"), "processes is 0"),
        (("--suite", "tabletop", "--policy", "expert", "--out", "{}/x", "--device", "gpu"), "there is no device 'gpu'"),
    ],
)
def test_what_is_missing_or_wrong_is_said(complaint, tmp_path, arguments, sentence):
    assert sentence in complaint("eval", *(argument.replace("{}", str(tmp_path)) for argument in arguments))
