"""A disk that the machines of a cluster share under one path, so that relative paths name the same files on all."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError


class SharedDisk:
    """A mark in ``folder``, by which other machines are known to see it until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        """Makes ``folder`` if there is none."""
        self._mark, self._token = folder.resolve() / f".seen-{secrets.token_hex(4)}", secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(self._token, encoding="utf-8")

    def given(self) -> JsonObject:
        """What :func:`enter` takes on another machine."""
        return {"folder": os.getcwd(), "mark": str(self._mark), "token": self._token}

    def close(self) -> None:
        """Remove the mark; safe to call twice."""
        self._mark.unlink(missing_ok=True)


def enter(folder: str, mark: str, token: str) -> None:
    """Make ``folder`` the working folder of this process.

    Raises UserError when there is none, and unless the file ``mark`` holds ``token``.
    """
    out = Path(mark)
    if not out.is_file() or out.read_text(encoding="utf-8") != token:
        raise _not_shared(str(out.parent))
    if not Path(folder).is_dir():
        raise _not_shared(folder)
    os.chdir(folder)


def _not_shared(folder: str) -> UserError:
    return UserError(
        f"the machine {socket.gethostname()!r} does not see {folder!r} of the one that asks, so nothing was started "
        "there; give the command in a folder, and an --out, on a disk that all machines of the cluster share under one "
        "path, or use --engine local."
    )
