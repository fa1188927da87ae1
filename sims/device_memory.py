"""How many environments fit the memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch

from vla_rl.contract.errors import UserError

_SHARE = 0.9  # of the free memory; the rest is for what is allocated while simulating


def require_memory(each: int, num_envs: int, device: torch.device) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of ``each`` bytes do not."""
    free = free_bytes(device)
    if num_envs * each > _SHARE * free:
        raise UserError(
            f"{num_envs} environments of {each / 1e6:.2f} MB each do not fit the {free / 1e9:.1f} GB that are free on "
            f"{str(device)!r}, so none was made; {int(_SHARE * free / each)} fit."
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * int(kilobytes)
