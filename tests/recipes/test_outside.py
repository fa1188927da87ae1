"""What people bring: a policy, an environment and a config in a folder of their own, used by ``vla-rl`` alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from vla_rl.cli import main

FILES = Path(__file__).parent / "outside"
REPOSITORY = Path(__file__).resolve().parents[2]
# As the console script, which unlike ``python -m`` does not look for modules in the working folder by itself.
COMMANDS = """
import json, sys
from vla_rl.cli import main
for arguments in json.loads(sys.argv[1]):
    for stream in (sys.stdout, sys.stderr):
        print("\f", file=stream, flush=True)
    main(arguments)
"""


@pytest.fixture
def outside(tmp_path) -> Path:
    """A folder with nothing but a policy, an environment and a config."""
    for path in FILES.glob("*.py"):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


def vla_rl(folder: Path, *commands: Sequence[str]) -> list[str]:
    """What ``vla-rl`` with each of these arguments prints in ``folder``, in one process; they must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    program = [sys.executable, "-P", "-c", COMMANDS, json.dumps(commands)]
    options = {"cwd": folder, "env": environment, "text": True, "capture_output": True, "timeout": PATIENCE}
    done = subprocess.run(program, **options)
    assert done.returncode == 0, done.stderr
    return [one + other for one, other in zip(done.stdout.split("\f")[1:], done.stderr.split("\f")[1:], strict=True)]


def result(printed: str) -> dict[str, float]:
    """The JSON object among what was printed."""
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def test_a_policy_an_environment_and_a_config_of_ones_own(outside, monkeypatch, capsys):
    """Trained, gone on with from the run's own copy of the config, inspected and evaluated."""
    run = outside / "runs" / "built"
    monkeypatch.chdir(outside)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])  # as of the console script
    main(["train", "mine.py:built", "--rl.loop.iterations", "10"])
    (outside / "mine.py").unlink()  # the run has its own copy
    main(["train", "--resume", "runs/built", "--rl.loop.iterations", "40"])
    assert f"done: {run.relative_to(outside)}" in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rl"]["success"] > 0.9 and summary["env_steps"] == 40 * 16 * 8
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(41)), "no iteration is lost or doubled"
    assert "StraightConfig" in (run / "config.json").read_text()
    main(["eval", "runs/built", "--episodes", "16"])
    played = result(capsys.readouterr().out)
    assert played["success"] > 0.9 and played["episodes"] == 16
    targets = {"runs/built": "best", "runs/built/checkpoints/best": "act", "rail:make": "determinism"}
    for target, word in targets.items():
        main(["inspect", target])
        assert word in capsys.readouterr().out
    for name in ("straight", "rail"):
        del sys.modules[name]


@pytest.mark.full
def test_a_policy_that_is_named_on_the_command_line(outside):
    arguments = ("--rl.loop.iterations", "2", "--env", "rail:make", "--env.options", '{"time_limit": 5}')
    vla_rl(outside, ("train", "mine.py:named", *arguments, "--out", "run"))
    kept = json.loads((outside / "run" / "checkpoints" / "start" / "config.json").read_text())
    assert kept["policy"] == "straight:Straight" and kept["spec"]["time_limit"] == 5


@pytest.mark.full
def test_a_recorded_folder_becomes_a_policy_that_is_improved_in_its_environment(outside):
    """Recorded by ``collect``, imitated in the environment's own bounds, improved by residual TD3, evaluated."""
    lift = ("--env", "lift", "--env.options", '{"image_size": 32, "deadline": 20}')
    collect = ("collect", *lift, "--count", "2", "--out", "recorded")
    small = ("--new.width", "32", "--new.blocks", "1", "--imitation.fit.steps", "3", "--imitation.fit.batch", "8")
    imitate = ("train", "imitate.py:from_dataset", "--dataset", "recorded", *lift, *small, "--out", "imitated")
    learning = ("--rl.loop.iterations", "2", "--rl.algorithm.learning-starts", "16", "--rl.loop.validate-every", "1")
    learning += ("--rl.experience.num-envs", "2", "--rl.experience.decisions", "8", "--rl.replay.capacity", "200")
    counts = ("--evaluation.validation", "2", "--evaluation.test", "2", "--evaluation.num-envs", "2")
    given = ("--policy", "imitated/checkpoints/imitation", "--demonstrations", "recorded")
    improve = ("train", "compare.py:residual_td3", *given, *lift, *learning, *counts, "--out", "improved")
    play = ("eval", "improved", "--episodes", "2", "--num-envs", "2")
    played = result(vla_rl(outside, collect, imitate, improve, play)[-1])
    imitated = json.loads((outside / "imitated" / "checkpoints" / "imitation" / "config.json").read_text())
    assert imitated["spec"]["name"] == "lift" and len(imitated["spec"]["tasks"]) > 2, "the environment's own tasks"
    assert json.loads((outside / "improved" / "summary.json").read_text())["env_steps"] == 2 * 2 * 8 * 5
    assert played["episodes"] == 2
