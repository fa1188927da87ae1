"""How much memory of this machine is free, and how much a process takes."""

from __future__ import annotations

import re
from pathlib import Path

SHARE = 0.9  # of the free memory; the rest is for what is allocated while simulating


def free_bytes() -> int:
    """Bytes that can still be allocated."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024


def process_bytes(pid: int | str = "self") -> int:
    """Bytes of process ``pid`` that are its own: without files that it has mapped, which it shares with others."""
    status = Path(f"/proc/{pid}/status")
    return (_kilobytes(status, "RssAnon") + _kilobytes(status, "RssShmem")) * 1024


def _kilobytes(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0  # a process that has ended has none
