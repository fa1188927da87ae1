"""``vla-rl eval``: a success rate with its interval, a suite's table, or one sentence about what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.recipes.quick_suite import quick, save_policy
from vla_rl.cli import main
from vla_rl.recipes.policies import fingerprint

SMALL = ("--env", "lift", "--episodes", "6", "--num-envs", "4", "--env.options", '{"deadline": 10}')


def test_the_rate_comes_with_interval_seeds_and_causes(untrained, capsys, tmp_path):
    folder = str(untrained())
    main(["eval", folder, *SMALL])
    printed = capsys.readouterr()
    rate = json.loads(printed.out)
    assert 0 == rate["low"] <= rate["success"] < rate["high"] < 1 and rate["episodes"] == 6
    said = " ".join(printed.err.split())
    assert "of 6 validation episodes" in said and "too late 6" in said
    main(["eval", folder, *SMALL, "--seeds", "test", "--out", str(tmp_path / "rate.json")])
    kept = json.loads((tmp_path / "rate.json").read_text())
    played = {"env": "lift", "seeds": "test", "checkpoint": folder, "sha256": fingerprint(folder)}
    assert kept == {**rate, **played}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--seeds test", "eval needs a checkpoint or run folder"),
        ("{} --seeds tests", "no 'tests' seeds; did you mean 'test'?"),
        ("{} --num-envs 0", "measure nothing"),
        ("{} --env lift --device gpu", "there is no device 'gpu'"),
        ("{} --env lift --temperature -1", "temperature is -1"),
        ("{} --epsodes 1", "no field '--epsodes', so it cannot be set; did you mean '--episodes'?"),
        ('{} --env lift --env.options {"image_size":48}', "trained for images"),
        ('{} --env lift --env.options {"image_sise":48}', "no option 'image_sise', so it cannot be made; did you mean"),
        ("{}", "eval needs an environment and none was named, so nothing can be played; add --env NAME"),
        ("--suite tabletop --policy expert", "--out is missing"),
        ("--suit tabletop --policy expert --out x", "eval has no option '--suit'"),
        ("--suite tabeltop --policy expert --out x", "did you mean 'tabletop'?"),
        ("--suite tabletop --policy nowhere --out {}/x --tasks lift", "has no config.json"),
        ("--suite tabletop --policy expert --out {}/x --processes 0", "processes is 0"),
    ],
)
def test_what_does_not_fit_is_said(complaint, untrained, arguments, sentence):
    folder = str(untrained())
    assert sentence in complaint("eval", *(argument.replace("{}", folder) for argument in arguments.split()))


def test_at_temperature_0_the_noise_decides_nothing(untrained, tmp_path):
    folder, chosen = str(untrained()), []
    for noise, temperature in (("1", "0"), ("2", "0"), ("2", "1")):
        trace = tmp_path / f"{noise}-{temperature}"
        given = ("--seed", noise, "--temperature", temperature, "--trace", str(trace))
        main(["eval", folder, *SMALL, *given])
        chosen.append(np.stack([np.load(file)["sample"] for file in sorted(trace.glob("*.npz"))]))
    assert np.array_equal(chosen[0], chosen[1]) and not np.array_equal(chosen[1], chosen[2])


def test_a_checkpoint_for_another_camera_is_played(untrained, capsys):
    options = '{"deadline": 5, "cameras": ["top"], "image_size": 32}'
    main(["eval", str(untrained(cameras=("top",), image_size=32)), *SMALL[:6], "--env.options", options])
    assert json.loads(capsys.readouterr().out)["episodes"] == 6


def test_a_folder_that_is_no_checkpoint_is_said(complaint, tmp_path):
    assert "has no config.json, so it is not a checkpoint" in complaint("eval", tmp_path, "--env", "lift")
    assert "has no config.json" in complaint("eval", tmp_path / "nowhere", "--env", "lift")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "holds a 'llama' policy, which vla-rl cannot open" in complaint("eval", tmp_path, "--env", "lift")
    (tmp_path / "config.json").write_text("{}")
    assert "was not written by vla-rl" in complaint("eval", tmp_path, "--env", "lift")


def test_a_checkpoint_in_a_run_is_played_in_its_environment(capsys, tmp_path):
    """Gymnasium's tasks as well, which are evaluated by returns."""
    numbers = ["--rl.loop.iterations", "1", "--rl.loop.validate-every", "1", "--rl.experience.num_envs", "2"]
    numbers += ["--rl.experience.decisions", "8", "--evaluation.validation", "2", "--evaluation.test", "2"]
    run = tmp_path / "pendulum"
    main(["train", "configs/gym.py:inverted_pendulum", *numbers, "--out", str(run)])
    capsys.readouterr()
    main(["eval", str(run / "checkpoints" / "best"), "--episodes", "3", "--num-envs", "2"])
    said = capsys.readouterr()
    returns = json.loads(said.out)["returns"]
    assert returns["episodes"] == 3 and returns["low"] is None and returns["mean"] > 0  # of so few
    assert "mean return" in " ".join(said.err.split())
    main(["inspect", str(run / "checkpoints" / "best")])
    assert "in the environment of its run" in capsys.readouterr().out


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
