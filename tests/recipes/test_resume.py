"""A run that was killed and resumed ends as one that never was: the same weights, generators and counters."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.held import held_after, held_inside
from tests.patience import PATIENCE
from vla_rl.cli import main
from vla_rl.training.checkpoint import latest_state

ITERATIONS = 4
VLA_RL = [sys.executable, "-m", "vla_rl.cli"]


def held(code: str) -> list[str]:
    """The program after ``code``, which holds it up."""
    return [sys.executable, "-c", code + "from vla_rl.cli import main\nmain()"]


@pytest.fixture
def arguments(untrained, quick):
    """``arguments(out)``: a short run of reinforcement learning, every iteration of which changes the weights."""

    def of(out: Path, iterations: int = ITERATIONS, recipe: str = "improve", n_obs_steps: int = 1) -> list[str]:
        policy = str(untrained(n_obs_steps=n_obs_steps))
        learning = ["--rl.loop.iterations", str(iterations), "--rl.algorithm.critic-warmup", "1"]
        return ["train", quick.replace(":improve", f":{recipe}"), "--policy", policy, "--out", str(out), *learning]

    return of


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of the kept weights, and of all tensors and numbers of the last state (environments, generators)."""
    files = ["checkpoints/best/model.safetensors"]
    files += [f"state/{ITERATIONS:08d}/{name}" for name in ("tensors.safetensors", "state.json")]
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files}


def metrics(out: Path) -> list[dict[str, float]]:
    """The metrics without wall-clock times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]


def start(command: list[str], vla_rl: Sequence[str] = VLA_RL) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.Popen([*vla_rl, *command], stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(when, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def steps_done(out: Path) -> int:
    return max((int(path.name) for path in (out / "state").glob("*") if path.name.isdigit()), default=-1)


def writing(out: Path) -> bool:
    return any((out / "state").glob("*.writing"))


@pytest.mark.full
def test_a_finished_run_goes_on_to_more_iterations(arguments, tmp_path, capsys, complaint):
    out = tmp_path / "run"
    main([*arguments(out, iterations=1), "--rl.loop.save-every", "5"])
    first = (out / "summary.json").read_text()
    main(["train", "--resume", str(out), "--rl.loop.iterations", "2"])
    assert "goes on from iteration 1, its last saved state" in " ".join(capsys.readouterr().err.split())
    assert (out / "summary.1.json").read_text() == first and (out / "summary.json").exists()
    assert [line["step"] for line in metrics(out) if line["stage"] == "rl"] == [0, 1, 2]
    assert json.loads((out / "config.json").read_text())["rl"]["loop"]["iterations"] == 2
    refused = complaint("train", "--resume", out, "--rl.loop.iterations", "1")
    assert "ends the run no later than its own 2" in refused
    assert "larger --rl.loop.iterations or --rl.loop.env-steps" in complaint("train", "--resume", out)
    assert not (out / "summary.2.json").exists()


@pytest.mark.parametrize(
    ("recipe", "n_obs_steps"),
    [
        ("improve", 1),
        *(
            pytest.param(name, steps, marks=pytest.mark.full)
            for name, steps in (("residual", 1), ("processes", 1), ("randomized", 1), ("curriculum", 1), ("paid", 3))
        ),
    ],
)
def test_a_killed_run_goes_on_and_ends_the_same(recipe, n_obs_steps, arguments, tmp_path):
    main(arguments(tmp_path / "whole", recipe=recipe, n_obs_steps=n_obs_steps))
    process = start(
        arguments(tmp_path / "killed", recipe=recipe, n_obs_steps=n_obs_steps), held(held_after(ITERATIONS - 1))
    )
    wait_for(lambda: steps_done(tmp_path / "killed") >= 2, process)
    process.kill()
    process.communicate()
    assert 2 <= steps_done(tmp_path / "killed") < ITERATIONS
    main(["train", "--resume", str(tmp_path / "killed")])
    assert digests(tmp_path / "whole") == digests(tmp_path / "killed")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")]
    for summary in summaries:
        del summary["seconds"]
    assert summaries[0] == summaries[1] and summaries[0]["best_iteration"] == ITERATIONS


@pytest.mark.full
def test_the_noise_of_collecting_processes_falls_as_that_of_one(arguments, tmp_path):
    """Otherwise the log-probs that they record would not be those of the policy that learns."""
    main(arguments(tmp_path / "run", 4, "processes"))
    rows = [row for row in metrics(tmp_path / "run") if "policy/logprob_gap" in row]
    assert len(rows) == 4 and all(row["policy/logprob_gap"] < 1e-3 for row in rows)
    assert rows[-1]["policy/noise_std"] < 0.7 * rows[0]["policy/noise_std"]


@pytest.mark.full
def test_sigterm_saves_after_the_iteration_and_says_how_to_go_on(arguments, tmp_path):
    out = tmp_path / "run"
    process = start([*arguments(out, 10_000), "--rl.loop.save-every", "10000"])
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 3, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143 and said.rstrip().endswith(f"stopped; go on with: vla-rl train --resume {out}")
    assert "Traceback" not in said
    step, state = latest_state(out / "state")
    assert step == state["iteration"] == len(metrics(out)) - 1 >= 3


def test_a_run_that_cannot_be_resumed_is_refused(arguments, tmp_path, complaint):
    assert "no config.json" in complaint("train", "--resume", tmp_path / "nothing")
    main(arguments(tmp_path / "done", 1))
    assert "is finished" in complaint("train", "--resume", tmp_path / "done")
    assert "'--seed' cannot change it" in complaint("train", "--resume", tmp_path / "done", "--seed", "3")


@pytest.mark.full
def test_a_line_that_was_cut_off_is_forgotten(arguments, tmp_path):
    """Killed after a report and before its state: the iteration is repeated and reported once."""
    out = tmp_path / "run"
    process = start(arguments(out, 10_000))
    wait_for(lambda: steps_done(out) >= 2, process)
    process.kill()
    process.communicate()
    done, lines = steps_done(out), (out / "metrics.jsonl").read_text().splitlines()
    extra = {**json.loads(lines[done]), "step": done + 1}
    (out / "metrics.jsonl").write_text("\n".join([*lines[: done + 1], json.dumps(extra), '{"stage": "rl", "st']))
    resumed = start(["train", "--resume", str(out)])
    wait_for(lambda: steps_done(out) >= done + 2, resumed)
    resumed.kill()
    resumed.communicate()
    steps = [line["step"] for line in metrics(out)[: done + 3]]
    assert steps == list(range(done + 3))


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_twenty_kills(arguments, tmp_path):
    """Ten runs are killed at a random moment and again inside the writing of a state; all end the same."""
    main(arguments(tmp_path / "whole"))
    expected, rng = digests(tmp_path / "whole"), np.random.default_rng(1)
    for number in range(10):
        out = tmp_path / f"run{number}"
        process = start(arguments(out))
        moment, pause = int(rng.integers(0, 3)), rng.uniform(0, 0.5)
        wait_for(lambda out=out, moment=moment: steps_done(out) >= moment, process)
        time.sleep(pause)
        process.kill()
        process.communicate()
        if steps_done(out) < ITERATIONS:
            resumed = start(["train", "--resume", str(out)], held(held_inside(number % 3)))
            assert "held\n" in resumed.stderr
            resumed.kill()
            resumed.communicate()
            assert writing(out)
        if not (out / "summary.json").exists():
            main(["train", "--resume", str(out)])
        assert digests(out) == expected, f"run {number}"
        assert metrics(out) == metrics(tmp_path / "whole")
