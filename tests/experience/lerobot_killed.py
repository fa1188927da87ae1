"""Kills writers at chosen moments: ``python -m tests.experience.lerobot_killed FOLDER EXISTING FIRST STRIDE``.

A writer adds two episodes to a dataset of EXISTING (0 or 1) episodes and finishes it.  Every function through which it
changes the disk is a moment to die at: before the call, after it, and for those that fill files, with only half of the
file written.  Each moment has its own process, forked while this one has no threads yet.  FOLDER/N holds what the
writer of moment N left, FOLDER/N.added the number of episodes that were acknowledged as safe.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.experience.lerobot_makers import episode, schema, task, write
from vla_rl.contract.errors import UserError
from vla_rl.experience.lerobot import video
from vla_rl.experience.lerobot.writer import DatasetWriter

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


def add(root: Path, existing: int, last: int, acknowledged: int) -> int:
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


def main(folder: Path, existing: int, first: int, stride: int) -> Iterator[str]:
    if existing:
        forked(lambda: write(folder / "before", existing) or 0)
    undisturbed, known = prepared(folder, "undisturbed")
    count = forked(lambda: add(undisturbed, existing, -1, known))
    yield f"{count} moments"
    finishing = range(count - 40, count, min(stride, 8))  # the files of the finished dataset are moved into place
    for number in sorted({*range(first, count, stride), *finishing}):
        root, acknowledged = prepared(folder, number)

        def killed(root: Path = root, number: int = number, known: int = acknowledged) -> int:
            return add(root, existing, number, known)

        yield f"{number} {forked(killed)}"
        os.close(acknowledged)


if __name__ == "__main__":
    for line in main(Path(sys.argv[1]), *map(int, sys.argv[2:])):
        print(line, flush=True)
