"""Trackers get every number of a run; TensorBoard and Weights & Biases files hold them."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.recipes.train_rewards import TrainSuccess
from vla_rl.training import tracking
from vla_rl.training.checkpoint import save_state
from vla_rl.training.fit import FitConfig
from vla_rl.training.tracking import LOCK, TRACKERS, RunFolder, WandbTracker, prolong, wandb_mode


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """As on a machine where nobody has logged in to Weights & Biases, whoever runs this test."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def tracked(*names: str) -> TrainSuccess:
    return replace(TrainSuccess(), tracking=names)


class Notes:
    """A tracker that remembers."""

    package = "json"
    opened: list[Notes]

    def __init__(self, run, config) -> None:
        self.run, self.config, self.lines, self.closed = run, config, [], 0
        self.opened.append(self)

    def log(self, stage, step, metrics) -> None:
        self.lines.append((stage, step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def notes(monkeypatch):
    kind = type("Fresh", (Notes,), {"opened": []})
    monkeypatch.setitem(TRACKERS, "notes", kind)
    return kind.opened


def test_trackers_get_every_line_of_the_metrics(notes, tmp_path):
    folder = RunFolder(tmp_path / "run", tracked("notes", "notes"))
    (one,) = notes  # named twice, opened once
    assert one.run == tmp_path / "run" and one.config["seed"] == 1
    folder.log("imitation", 24, {"loss": 0.5})
    folder.log("rl", 1, {"validation": 0.75, "kl": math.nan})
    assert one.lines[0] == ("imitation", 24, {"loss": 0.5})
    assert one.lines[1][:2] == ("rl", 1) and math.isnan(one.lines[1][2]["kl"])
    assert folder.metrics("rl")[0]["kl"] is None
    folder.close()
    assert one.closed == 1


def test_a_metric_cannot_pass_for_an_entry_of_the_line(tmp_path):
    folder = RunFolder(tmp_path / "run", {})
    with pytest.raises(ContractError, match="'stage' has the name of an entry"):
        folder.log("rl", 1, {"validation": 1.0, "stage": 2.0})
    assert folder.metrics("rl") == []


def test_trackers_get_the_lines_of_a_resumed_run(notes, tmp_path):
    RunFolder(tmp_path / "run", tracked("notes")).close()
    RunFolder.resume(tmp_path / "run").log("rl", 2, {"validation": 1.0})
    assert [one.lines for one in notes] == [[], [("rl", 2, {"validation": 1.0})]]


class Second(OneProcess):
    rank, size = 1, 2


def test_without_the_field_or_in_another_process_there_are_none(notes, tmp_path):
    for folder in (
        RunFolder(tmp_path / "a", {"no": "field"}),
        RunFolder(tmp_path / "b", tracked("notes"), Second()),
    ):
        folder.log("rl", 1, {"validation": 1.0})
        folder.close()
    assert notes == []


def test_a_mistake_is_answered_before_the_earlier_run_is_moved(tmp_path, monkeypatch):
    RunFolder(tmp_path / "run", tracked())
    with pytest.raises(UserError, match=r"no tracker 'tensorbord'.* did you mean 'tensorboard'\?"):
        RunFolder(tmp_path / "run", tracked("tensorbord"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(
        UserError, match=r"'wandb' needs wandb, which is not installed.* pip install 'vla-rl\[tracking\]'"
    ):
        RunFolder(tmp_path / "run", tracked("wandb"))
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_tensorboard_reads_back_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed in (False, True):
        config = tracked("tensorboard")
        folder = RunFolder.resume(tmp_path / "run") if resumed else RunFolder(tmp_path / "run", config)
        for step in (3, 4) if resumed else (1, 2):
            folder.log("rl", step, {"validation": step / 8, "kl": 0.5**step})
        folder.log("imitation", 24, {"loss": math.nan})
        folder.close()
        folder.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["imitation/loss", "rl/kl", "rl/validation"]
    scalars = {name: [(item.step, item.value) for item in events.Scalars(name)] for name in ("rl/kl", "rl/validation")}
    assert scalars == {"rl/kl": [(s, 0.5**s) for s in range(1, 5)], "rl/validation": [(s, s / 8) for s in range(1, 5)]}
    assert math.isnan(events.Scalars("imitation/loss")[0].value)


def written(path, wanted: bytes) -> bytes:
    """The file's bytes, as soon as ``wanted`` (a pattern) is in them; wandb's own process writes them."""
    deadline = time.monotonic() + PATIENCE
    while not re.search(wanted, path.read_bytes(), re.DOTALL) and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_bytes()


@pytest.mark.full
def test_wandb_writes_a_run_that_can_be_sent_later(logged_out, tmp_path):
    ids = []
    for resumed in (False, True):
        tracker = WandbTracker(tmp_path / "run", {"seed": 7, "world": {"env": "lift"}})
        tracker.log("rl", 3, {"validation": 0.8125 if resumed else 0.3125})
        tracker.close()
        tracker.close()
        runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        ids.append(runs[-1].stem)
        wanted = rb"rl/validation.{0,8}0\.%d125" % (8 if resumed else 3)
        found = written(runs[-1], wanted)
        assert re.search(wanted, found, re.DOTALL)
        assert b"rl/step" in found and b'"env":"lift"' in found.replace(b" ", b"")
        assert f"{tmp_path.name}/run".encode() in found
    assert len(runs) == 2 and ids[0] == ids[1], "a resumed run is the same run"


def test_where_wandb_sends_is_decided_once_and_asks_nobody(logged_out, monkeypatch):
    asked = []
    monkeypatch.setattr("wandb.login", lambda **options: asked.append(options) or len(asked) > 1)
    assert wandb_mode() == "offline" and wandb_mode() == "online"
    assert asked == 2 * [{"prompt": False, "verify": False}]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() is None and len(asked) == 2


# -- the folder belongs to one process, names damaged lines, and is removed after a failed start -----------------------


def forked(path: Path) -> tuple[int, str]:
    """The id of another process that runs in ``path`` and does nothing more, or ends at once, and what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        tracking._held.clear()
        try:
            RunFolder(path, FitConfig())
        except UserError as error:
            os.write(writer, str(error).encode())
            os._exit(1)
        os.write(writer, b"running")
        signal.pause()
    said = os.read(reader, 4096).decode()
    return child, said


@pytest.fixture
def another(tmp_path):
    """The id of a process that runs in ``tmp_path/run``."""
    child, said = forked(tmp_path / "run")
    assert said == "running"
    yield child
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_in_which_another_process_runs_is_refused(another, tmp_path):
    before = (tmp_path / "run" / "config.json").stat().st_mtime_ns
    save_state(tmp_path / "run" / "state", 0, {})
    for start in (
        lambda: RunFolder(tmp_path / "run", FitConfig()),
        lambda: RunFolder.resume(tmp_path / "run"),
        lambda: prolong(tmp_path / "run", FitConfig(steps=2)),
    ):
        with pytest.raises(UserError, match=rf"process {another} is writing to .*choose another folder"):
            start()
    assert (tmp_path / "run" / "config.json").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("damaged", ["state/00000000/state.json", "metrics.jsonl", "config.json"])
def test_a_finished_run_that_cannot_go_on_stays_finished(damaged, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", FitConfig())
    folder.save_state(0, {})
    folder.write_summary({"done": True})
    folder.close()
    if damaged == "config.json":  # it cannot be written
        monkeypatch.setattr(tracking, "write_json", refused)
    else:
        (tmp_path / "run" / damaged).write_text("{\n")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != LOCK}
    with pytest.raises(UserError):
        prolong(tmp_path / "run", FitConfig(steps=2))
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != LOCK}
    assert after == before


def refused(*given):
    raise UserError("the disk is full; free some room.")


def test_the_lock_of_a_dead_process_is_taken_over(another, tmp_path):
    os.kill(another, signal.SIGKILL)
    os.waitpid(another, 0)
    assert (tmp_path / "run" / LOCK).exists()
    folder = RunFolder.resume(tmp_path / "run")
    assert (tmp_path / "run" / LOCK).read_text() == str(os.getpid())
    folder.close()
    assert not (tmp_path / "run" / LOCK).exists()


def test_after_a_run_was_moved_aside_the_new_folder_is_locked(tmp_path):
    RunFolder(tmp_path / "run", FitConfig()).close()
    folder = RunFolder(tmp_path / "run", FitConfig())
    assert folder.moved_to == tmp_path / "run.1"
    refused, said = forked(tmp_path / "run")
    assert os.waitpid(refused, 0)[1] and f"process {os.getpid()} is writing" in said
    assert not (tmp_path / "run.1" / LOCK).exists()
    folder.close()


def test_a_run_that_recorded_nothing_leaves_no_folder(tmp_path):
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
