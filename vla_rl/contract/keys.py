"""Files that guard: secrets that nobody else may read, and what must never be there in part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from vla_rl.contract.errors import UserError

_SHORTEST = 16  # bytes of a secret


def read_key(path: str | Path) -> bytes:
    """The secret in the file ``path``, without blanks around it.

    Raises UserError for a file that cannot be read, holds fewer than 16 bytes, or can be read by other users.
    """
    try:
        with open(path, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise UserError(
            f"the key file {str(path)!r} cannot be read ({error.strerror}), so it guards nothing; check the file."
        ) from error
    if mode & 0o077:
        raise UserError(
            f"the key file {str(path)!r} can be read by other users of this machine, who could use it, so it is not "
            f"used; run: chmod 600 {path}."
        )
    if len(key) < _SHORTEST:
        raise UserError(
            f"the key file {str(path)!r} holds {len(key)} bytes, so whoever guesses them would be let in; make one "
            f"of at least {_SHORTEST}: (umask 077; openssl rand -hex 32 > {path})."
        )
    return key


def write_whole(path: Path, data: bytes, mode: int = 0o600, put: Callable[[Path, Path], object] | None = None) -> None:
    """Have ``data`` in the file ``path``, also after a power cut: at every moment it is as before or whole.

    It has ``mode`` from the beginning.  ``put``: ``os.link`` where it must be a new file, else ``os.replace``.  Raises
    OSError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        (put or os.replace)(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
