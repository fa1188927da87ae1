"""The worker processes of isolated environments that this process has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def worker_pids() -> set[int]:
    """Ids of the worker processes whose parent is this process; those that have ended are left out."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"sims.isolation.worker" in (path / "cmdline").read_bytes():
                found.add(int(path.name))
    return found
