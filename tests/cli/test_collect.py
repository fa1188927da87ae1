"""``vla-rl collect``: demonstrations on disk, all successes, the same for the same seed, none lost by a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.patience import PATIENCE
from vla_rl.cli import main
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations

LIFT = ("--env", "lift")
TOY = ("--env.name", "counting", "--expert", "tests.cli.test_collect:Echo")


class Echo:
    """Says which step it takes; in the counting environment every second seed ends with success."""

    def __init__(self, horizon: int) -> None:
        pass

    def act(self, obs) -> np.ndarray:
        return np.stack([obs.time + 1, obs.state[:, 0]], -1)[:, None].astype(np.float32)


class Slow(Echo):
    """Gives one time to interfere."""

    def act(self, obs) -> np.ndarray:
        time.sleep(0.01)
        return super().act(obs)


def collect(path, *arguments) -> Demonstrations:
    main(["collect", *(LIFT if "--env.name" not in arguments else ()), "--count", "3", "--out", str(path), *arguments])
    return load_demonstrations(path)


def test_demonstrations_hold_all_that_imitation_needs(tmp_path, capsys):
    episodes = collect(tmp_path / "new" / "demonstrations")
    assert "3 episodes" in capsys.readouterr().err
    assert episodes.count == 3
    assert episodes.images["front"].shape == (len(episodes.state), 64, 64, 3)
    assert set(np.diff(episodes.episode)) == {0, 1}
    assert np.array_equal(episodes.time[np.diff(episodes.episode, prepend=-1) == 1], [0, 0, 0])
    assert set(episodes.seed) <= set(seed_ranges.training_seeds(1, "demonstrations"))
    assert len(episodes.tasks) == 4 and len(episodes.action_names) == 4 and episodes.fps == pytest.approx(1 / 0.06)


def test_the_seed_decides_and_options_reach_the_environment(tmp_path, capsys):
    small = ("--env.options", '{"image_size": 16}')
    one, repeated, other = (collect(tmp_path / "e", "--seed", seed, *small) for seed in ("5", "5", "6"))
    assert one.images["front"].shape[1:] == (16, 16, 3)
    assert np.array_equal(one.action, repeated.action) and np.array_equal(one.images["front"], repeated.images["front"])
    assert not np.array_equal(one.action[:10], other.action[:10])
    assert "it is now" in capsys.readouterr().err
    assert np.array_equal(load_demonstrations(tmp_path / "e.1").action, one.action), "the earlier ones are still there"


def test_what_cannot_be_recorded_is_said(complaint, tmp_path):
    """An expert that never succeeds, and places that cannot be written to."""
    idle = ("--expert", "sims.mujoco.tasks.lift:LiftExpert", "--env.options", '{"deadline": 2}')
    assert "none of 2 demonstrations" in complaint("collect", *LIFT, "--count", "2", *idle, "--out", tmp_path / "e")
    assert not (tmp_path / "e").exists()
    (tmp_path / "file").touch()
    assert "could not be written to" in complaint("collect", "--count", "2", *TOY, "--out", tmp_path / "file" / "e")
    assert "exists and is no dataset" in complaint("collect", "--count", "2", *TOY, "--out", tmp_path / "file")
    assert "no folder" in complaint("collect", "--repair", tmp_path / "nothing")


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_stopped_recording_can_be_finished(tmp_path, capsys, blow):
    out = tmp_path / "e"
    slow = ["--env.name", "counting", "--expert", "tests.cli.test_collect:Slow", "--num-envs", "1"]
    command = [sys.executable, "-m", "vla_rl.cli", "collect", "--count", "500", "--out", str(out), *slow]
    settings = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.getcwd(), "COLUMNS": "500"}

    def hear() -> None:  # a background job ignores Ctrl-C, and its children would, too
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True, preexec_fn=hear)
    while len(list((out / "recording").glob("episode-??????"))) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(blow)
    said = process.communicate(timeout=PATIENCE)[1]
    before = load_demonstrations(out)
    assert before.count >= 3 and (blow == signal.SIGKILL or f"collect --repair {out}" in said.replace("\n", ""))
    main(["collect", "--repair", str(out)])
    assert "finished" in capsys.readouterr().err and not (out / "recording").exists()
    after = load_demonstrations(out)
    assert np.array_equal(before.state, after.state) and np.array_equal(before.seed, after.seed)
    assert np.array_equal(before.images["audit"], after.images["audit"])
