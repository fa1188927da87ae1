"""Writers that are killed: no finished episode is lost, and after a repair the dataset is whole and can grow."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experience.lerobot_makers import assert_holds, length, write
from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.experience.lerobot import disk
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import repair

ROOT = Path(__file__).parents[2]


def kill(folder: Path, existing: int, first: int, stride: int) -> dict[int, int]:
    """{moment: how many episodes were acknowledged before it}, of which FOLDER/MOMENT remains."""
    command = [sys.executable, "-m", "tests.experience.lerobot_killed", folder, existing, first, stride]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    count, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and int(count.split()[0]) > 100, done.stderr
    killed = {int(line.split()[0]): int(line.split()[1]) for line in lines}
    assert set(killed.values()) == {-signal.SIGKILL} and len(killed) >= int(count.split()[0]) // stride - 1
    return {number: (folder / f"{number}.added").stat().st_size for number in killed}


def assert_nothing_is_lost(root: Path, acknowledged: int, first: int) -> int:
    """Before and after a repair; returns how many episodes there are."""
    if first + acknowledged == 0 and not (root / "recording" / "header.json").exists():
        return 0  # killed before there was a dataset
    reader = DatasetReader(root)
    assert first + acknowledged <= len(reader) <= first + acknowledged + 1, "the last may be safe, not yet acknowledged"
    assert_holds(root, list(range(len(reader))))
    path = root / "meta" / "info.json"
    finished = json.loads(path.read_text())["total_episodes"] if path.exists() else 0
    assert not finished or reader.stats["action"]["count"] == [sum(map(length, range(finished)))]
    if (root / "recording").exists():
        assert repair(root) == []
    if not len(reader):
        assert not list(root.iterdir())
        return 0
    assert_holds(root, list(range(len(reader))))
    assert json.loads(path.read_text())["total_episodes"] == len(reader)
    assert DatasetReader(root).stats["action"]["count"] == [sum(map(length, range(len(reader))))]
    assert {path.name for path in root.iterdir()} == {"meta", "data", "videos"}
    assert not list(root.rglob("*.writing"))
    return len(reader)


def check(folder: Path, existing: int, first: int, stride: int) -> None:
    found = kill(folder, existing, first, stride)
    assert set(found.values()) == {0, 1, 2}, "they died before, between and after the episodes"
    for number, acknowledged in found.items():
        kept = assert_nothing_is_lost(folder / str(number), acknowledged, existing)
        if number % 5 == 0 or not kept:
            write(folder / str(number), 1, first=kept)
            assert_holds(folder / str(number), list(range(kept + 1)))


@pytest.mark.timeout(300)
def test_a_writer_killed_anywhere_loses_no_finished_episode(tmp_path):
    check(tmp_path, 1, 3, 29)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("existing", [0, 1])
def test_a_writer_killed_at_every_moment_loses_no_finished_episode(tmp_path, existing):
    check(tmp_path, existing, 0, 1)


def test_a_lock_that_its_owner_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """The owner removes the folder between another's opening of the file and its lock."""
    recording, flock, removed = tmp_path / "recording", fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not removed:
            removed.append(disk.remove_locked(recording))
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    handle = disk.take_lock(recording)
    with pytest.raises(UserError, match="is writing to"):
        disk.take_lock(recording)
    os.close(handle)
