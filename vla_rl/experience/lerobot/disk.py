"""Atomic writes that survive a crash or a power cut: write a temporary file, fsync, rename, fsync the folder."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, sync

WRITING, LOCK = ".writing", "lock"  # suffix of unfinished files and folders; the file that a writer has locked


def make_folder(path: Path) -> None:
    """Make ``path`` and its parents, each of them safe on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def free_name(path: Path, ending: str = "") -> Path:
    """The first of ``path.1``, ``path.2``, ... that does not exist."""
    names = (path.with_name(f"{path.name}.{number}{ending}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def move(source: Path, target: Path) -> None:
    """Rename a file or folder that is already synced; an existing ``target`` is replaced."""
    make_folder(target.parent)
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically in lerobot's style (indent 4, UTF-8 without escapes)."""
    writing = path.with_name(path.name + WRITING)
    make_folder(path.parent)
    writing.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    sync(writing)
    move(writing, path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_folder(folder: Path, lock: Path) -> int:
    """Lock ``folder`` by the file ``lock`` in it, as :func:`lock_file` does; other writers are excluded.

    Raises UserError, which names the process that holds it, or says that the folder cannot be written into; and where a
    link in it would have files written elsewhere.
    """
    check_folder(folder)
    try:
        return lock_file(lock)
    except BlockingIOError as error:
        raise UserError(
            f"process {error.filename} is writing to {str(folder)!r}, so a second one would mix its files with that "
            "one's; wait for it, end it, or choose another folder (--out)."
        ) from error
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} could not be written to ({error.strerror}), so nothing more is kept there; free some "
            "disk space or choose another folder (--out)."
        ) from error


def take_lock(recording: Path) -> int:
    """The lock of the dataset whose episodes are recorded in the folder ``recording``: :func:`lock_folder`."""
    return lock_folder(recording.parent, recording / LOCK)


def lock_file(path: Path) -> int:
    """``path`` opened and locked until it is closed or the process ends, however it ends; it holds the process's id.

    Raises BlockingIOError, whose ``filename`` is the id of the process that holds the lock.
    """
    while True:
        make_folder(path.parent)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # its owner has just removed the folder, as below the file
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise BlockingIOError(error.errno, error.strerror, owner) from error
        if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
            break
        os.close(handle)
    os.ftruncate(handle, 0)
    with suppress(OSError):  # a full disk; who holds it is for people
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def remove_locked(recording: Path) -> None:
    """Remove the folder whose lock this process holds, the lock last: whoever takes it then finds nothing of ours."""
    for path in recording.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    (recording / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # another writer has begun in it
        recording.rmdir()


def drop_lock(recording: Path, handle: int) -> None:
    """Let others write into a dataset; where nothing was recorded, its folders go as well."""
    if {path.name for path in recording.glob("*")} <= {LOCK}:
        remove_locked(recording)
        with suppress(OSError):  # there is something in it
            recording.parent.rmdir()
    os.close(handle)


def require_unlocked(root: Path) -> None:
    """Raise UserError while another writer records into the dataset ``root``."""
    if (root / "recording" / LOCK).exists():
        os.close(take_lock(root / "recording"))


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong with ``file`` (relative to the dataset) or one ``column`` of it; the text begins with a verb.

    ``episodes`` cannot be read because of it; () means that all can, with the loss that ``what`` states.
    """

    file: str
    what: str
    episodes: tuple[int, ...] = ()
    column: str = ""

    def __str__(self) -> str:
        where = f"{self.file!r}" + (f", column {self.column!r}," if self.column else "")
        lost = f", so {numbers(self.episodes)} cannot be read" if self.episodes else ""
        return f"{where} {self.what}{lost}"


class DamagedError(UserError):
    """Part of a dataset cannot be read; ``problem`` says which part."""

    def __init__(self, root: Path, problem: Problem) -> None:
        super().__init__(
            f"in the dataset {str(root)!r}, {problem}; copy the file again if its original is whole, or say "
            "explicitly that damaged episodes are to be left out."
        )
        self.problem = problem


def first_line(error: BaseException) -> str:
    """What ``error`` says, or its name."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def numbers(episodes: Sequence[int]) -> str:
    """``episode 3`` or ``episodes 0 to 4, 7``."""
    runs: list[list[int]] = []
    for episode in episodes:
        if runs and episode == runs[-1][-1] + 1:
            runs[-1].append(episode)
        else:
            runs.append([episode])
    text = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"episode{'s' if len(episodes) > 1 else ''} {text}"
