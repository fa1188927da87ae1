"""A run folder belongs to one process, names damaged lines, and is removed after a failed start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.training.fit import FitConfig
from vla_rl.training.tracking import LOCK, RunFolder

HOLD = (
    "import sys, time; from vla_rl.training.fit import FitConfig; from vla_rl.training.tracking import RunFolder; "
    "folder = RunFolder(sys.argv[1], FitConfig()); print('running', flush=True); time.sleep(600)"
)


@pytest.fixture
def another(tmp_path):
    """A process that runs in ``tmp_path/run``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"running\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_in_which_another_process_runs_is_refused_and_left_as_it_is(another, tmp_path):
    before = (tmp_path / "run" / "config.json").stat().st_mtime_ns
    for start in (lambda: RunFolder(tmp_path / "run", FitConfig()), lambda: RunFolder.resume(tmp_path / "run")):
        with pytest.raises(UserError, match=rf"process {another.pid} is running in .*choose another folder"):
            start()
    assert (tmp_path / "run" / "config.json").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_lock_of_a_dead_process_is_taken_over(another, tmp_path):
    os.kill(another.pid, signal.SIGKILL)
    another.wait()
    assert (tmp_path / "run" / LOCK).exists()
    folder = RunFolder.resume(tmp_path / "run")
    assert (tmp_path / "run" / LOCK).read_text() == str(os.getpid())
    folder.close()
    assert not (tmp_path / "run" / LOCK).exists()


def test_after_a_run_was_moved_aside_the_new_folder_is_locked(tmp_path):
    RunFolder(tmp_path / "run", FitConfig()).close()
    folder = RunFolder(tmp_path / "run", FitConfig())
    assert folder.moved_to == tmp_path / "run.1"
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert refused.returncode == 1 and f"process {os.getpid()} is running" in refused.stderr
    assert not (tmp_path / "run.1" / LOCK).exists()
    folder.close()


def test_a_run_that_failed_before_it_recorded_anything_leaves_no_folder(tmp_path):
    earlier = RunFolder(tmp_path / "run", FitConfig())
    earlier.log("imitation", 1, {"loss": 1.0})
    earlier.discard_if_empty()
    earlier.close()
    failed = RunFolder(tmp_path / "run", FitConfig(steps=7))
    failed.discard_if_empty()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # the earlier one, under its name
    resumed = RunFolder.resume(tmp_path / "run")
    assert resumed.config == FitConfig() and len(resumed.metrics("imitation")) == 1
    resumed.close()


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"stage": "rl"}', "null"])
def test_a_damaged_line_of_the_metrics_is_named(line, tmp_path):
    folder = RunFolder(tmp_path / "run", FitConfig())
    folder.log("rl", 1, {"loss": 1.0})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    folder.log("rl", 2, {"loss": 1.0})
    folder.close()
    for read in (lambda: folder.metrics("rl"), lambda: RunFolder.resume(tmp_path / "run")):
        with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl' is damaged .*delete that line"):
            read()


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"batch": 0}, {"lr": -1.0}, {"warmup": -1}, {"grad_norm": float("nan")}]
)
def test_fits_without_a_meaning_are_refused(wrong):
    with pytest.raises(UserError, match=rf"FitConfig\.{next(iter(wrong))} is .*choose a number"):
        FitConfig(**wrong)
