"""Writers that are killed: no finished episode is lost, and after a repair the dataset is whole and can grow."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.experience.lerobot_makers import assert_holds, episode, length, schema, task, write
from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.experience.lerobot import disk, video
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter, repair

ROOT = Path(__file__).parents[2]


def kill(folder: Path, existing: int, first: int, stride: int) -> dict[int, int]:
    """{moment: how many episodes were acknowledged before it}, of which FOLDER/MOMENT remains."""
    command = [sys.executable, "-m", "tests.experience.test_lerobot_killed", folder, existing, first, stride]
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
    check(tmp_path, 1, 3, 57)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("existing", [0, 1])
def test_killed_at_every_moment_it_loses_no_finished_episode(tmp_path, existing):
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


# -- the other process: ``python -m tests.experience.test_lerobot_killed FOLDER EXISTING FIRST STRIDE`` ---------------


# What is called, and which of its arguments is the file that it fills.
FILLS: dict[tuple[Any, str], int] = {
    (video, "encode"): 0,
    (video, "join"): 1,
    (pq, "write_table"): 1,
    (Path, "write_text"): 0,
}
CHANGES: list[tuple[Any, str]] = [(os, "fsync"), (os, "replace"), (shutil, "rmtree"), (Path, "unlink"), (Path, "mkdir")]


class Moments:
    """Counts the moments that pass and dies at number ``last``."""

    def __init__(self, root: Path, last: int) -> None:
        self.root, self.last, self.passed = root, last, 0

    def is_last(self) -> bool:
        """Whether this is the moment."""
        self.passed += 1
        if self.passed - 1 != self.last:
            return False
        self.passed += 1_000_000  # what follows are no moments
        refuse_another(self.root)
        return True

    def wrapped(self, function: Callable[..., Any], file: int | None) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if self.is_last():
                die()
            result = function(*given, **named)
            if file is not None and self.is_last():
                os.truncate(given[file], os.path.getsize(given[file]) // 2)
                die()
            if self.is_last():
                die()
            return result

        return call


def refuse_another(root: Path) -> None:
    """A second recorder into ``root`` is refused while the first holds its lock."""
    held = root / "recording" / "lock"
    if held.exists() and held.read_text() == str(os.getpid()):
        try:
            DatasetWriter(root, schema()).add(episode(99), task(99))
        except UserError as error:
            if "is writing to" in str(error):
                return
        os._exit(3)


def die() -> None:
    """At once, as by a power cut but for what the kernel still writes."""
    os.kill(os.getpid(), signal.SIGKILL)


def add_and_die(root: Path, existing: int, last: int, acknowledged: int) -> int:
    """Add two episodes, and die at moment ``last``; returns the number of moments."""
    moments = Moments(root, last)
    for (owner, name), file in {**FILLS, **dict.fromkeys(CHANGES)}.items():
        setattr(owner, name, moments.wrapped(getattr(owner, name), file))
    with DatasetWriter(root, schema()) as writer:
        for index in (existing, existing + 1):
            writer.add(episode(index), task(index))
            os.write(acknowledged, b"+")
    return moments.passed


def forked(act: Callable[[], int]) -> int:
    """Run ``act`` in a child; returns what it returned, or minus the signal that killed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"%d" % act())
        os._exit(0)
    os.close(writer)
    said = b"".join(iter(lambda: os.read(reader, 64), b""))
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return int(said) if said else status


def prepared(folder: Path, number: int | str) -> tuple[Path, int]:
    root = folder / str(number)
    if (folder / "before").exists():
        shutil.copytree(folder / "before", root)
    return root, os.open(folder / f"{number}.added", os.O_WRONLY | os.O_CREAT)


def kill_at(folder: Path, existing: int, first: int, stride: int) -> Iterator[str]:
    """A writer adds two episodes to a dataset of ``existing`` (0 or 1) episodes and finishes it.

    Every function through which it changes the disk is a moment to die at: before the call, after it, and for those
    that fill files, with only half of the file written.  Each moment has its own process, forked while this one has no
    threads yet.  FOLDER/N holds what the writer of moment N left, FOLDER/N.added as many bytes as episodes that were
    acknowledged as safe.
    """
    if existing:
        forked(lambda: write(folder / "before", existing) or 0)
    undisturbed, known = prepared(folder, "undisturbed")
    count = forked(lambda: add_and_die(undisturbed, existing, -1, known))
    yield f"{count} moments"
    finishing = range(count - 40, count, min(stride, 8))  # the files of the finished dataset are moved into place
    for number in sorted({*range(first, count, stride), *finishing}):
        root, acknowledged = prepared(folder, number)

        def killed(root: Path = root, number: int = number, known: int = acknowledged) -> int:
            return add_and_die(root, existing, number, known)

        yield f"{number} {forked(killed)}"
        os.close(acknowledged)


if __name__ == "__main__":
    for line in kill_at(Path(sys.argv[1]), *map(int, sys.argv[2:])):
        print(line, flush=True)
