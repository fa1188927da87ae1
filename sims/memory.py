"""How much memory of this machine or of a device is free, and how many environments fit it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError

SHARE = 0.9  # of the free memory; the rest is for what is allocated while simulating


def free_bytes(device: Any = "cpu") -> int:
    """Bytes that can still be allocated on ``device``, as torch names it."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024


def process_bytes(pid: int | str = "self") -> int:
    """Bytes of process ``pid`` that are its own: without files that it has mapped, which it shares with others."""
    status = Path(f"/proc/{pid}/status")
    return (_kilobytes(status, "RssAnon") + _kilobytes(status, "RssShmem")) * 1024


def require_memory(each: int, num_envs: int, device: Any) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of ``each`` bytes do not fit ``device``."""
    free = free_bytes(device)
    if num_envs * each > SHARE * free:
        raise UserError(
            f"{num_envs} environments of {each / 1e6:.2f} MB each do not fit the {free / 1e9:.1f} GB that are free on "
            f"{str(device)!r}, so none was made; {int(SHARE * free / each)} fit."
        )


def _kilobytes(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0  # a process that has ended has none
