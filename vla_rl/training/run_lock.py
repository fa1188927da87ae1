"""One process per run folder: a lock that the operating system releases when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder

LOCK = "run.lock"
_PAUSE = 0.05  # seconds between two looks at a lock
_held: dict[tuple[int, int], int] = {}  # device and inode of a lock file -> descriptor, of this process


def lock_run(folder: Path) -> int:
    """Lock ``folder`` for this process; returns what :func:`unlock_run` needs.

    A lock of this process, or one whose process has died, is taken over.  Raises UserError when another process runs
    in the folder, and where a link in it would have files written elsewhere.
    """
    check_folder(folder)
    if folder.resolve() == Path.cwd():
        raise UserError(
            f"{str(folder)!r} is the working folder, which a later run could not move aside, so nothing was run; name "
            "a folder of its own, for example --out runs/first."
        )
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"{str(folder)!r} cannot be a folder to write into ({error.strerror}), so nothing was run; choose "
                "another with --out."
            ) from error
        file = os.fstat(descriptor)
        if (own := _held.get((file.st_dev, file.st_ino))) is not None:
            return own  # closing ``descriptor`` would release the lock, because locks belong to the process
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"process {owner} is running in {str(folder)!r}, so a second run would mix its files with that one's; "
                "wait for it, end it, or choose another folder with --out."
            ) from error
        if (folder / LOCK).exists() and os.stat(folder / LOCK).st_ino == file.st_ino:
            break
        os.close(descriptor)  # its owner has just removed the file
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _held[file.st_dev, file.st_ino] = descriptor
    return descriptor


def await_unlocked(folder: Path, patience: float) -> None:
    """Return when no other process holds the lock of ``folder``, or after ``patience`` seconds.

    A process that was killed releases it at once; that of a machine that died on a network disk, when the server
    misses the machine.
    """
    end = time.monotonic() + patience
    while _locked(folder / LOCK) and time.monotonic() < end:
        time.sleep(_PAUSE)


def _locked(path: Path) -> bool:
    """Whether another process has locked the file at ``path``."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def unlock_run(folder: Path, descriptor: int) -> None:
    """Release the lock of ``folder`` and remove its file; safe to call twice."""
    for key, held in list(_held.items()):
        if held == descriptor:
            del _held[key]
            (folder / LOCK).unlink(missing_ok=True)
            os.close(descriptor)
