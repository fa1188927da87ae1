"""How many environments fit the memory of a device."""

from __future__ import annotations

import torch

from sims import host_memory
from sims.host_memory import SHARE
from vla_rl.contract.errors import UserError


def require_memory(each: int, num_envs: int, device: torch.device) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of ``each`` bytes do not."""
    free = free_bytes(device)
    if num_envs * each > SHARE * free:
        raise UserError(
            f"{num_envs} environments of {each / 1e6:.2f} MB each do not fit the {free / 1e9:.1f} GB that are free on "
            f"{str(device)!r}, so none was made; {int(SHARE * free / each)} fit."
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory.free_bytes()
