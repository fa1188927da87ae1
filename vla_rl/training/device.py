"""The one device of a run: policy, critic, learner, replay and world model are on it, generators are on the host."""

from __future__ import annotations

import os

import torch

from vla_rl.contract.errors import UserError


def resolve_device(name: str = "auto") -> torch.device:
    """The device of this process: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".

    Under torchrun, "auto" and "cuda" give every process of a machine its own GPU, by LOCAL_RANK.  Raises UserError for
    an unknown or missing device, and when several processes of a machine would share one GPU.
    """
    local_rank, processes = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"there is no device {name!r}, so nothing can be computed on it; choose auto, cpu, cuda, cuda:1 or mps."
        ) from error
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("this machine or this build of torch has no mps device, so nothing was started; choose cpu.")
    return _own_gpu(device, local_rank, processes) if device.type == "cuda" else device


def _own_gpu(device: torch.device, local_rank: int, processes: int) -> torch.device:
    """``device`` with its index; raises UserError when there is no such GPU or it is not this process's alone."""
    if not torch.cuda.is_available():
        raise UserError(
            f"torch finds no GPU, so {str(device)!r} cannot be used and nothing was started; choose cpu, or install a "
            "driver and a build of torch with CUDA."
        )
    if device.index is not None and processes > 1:
        raise UserError(
            f"{processes} processes on this machine would share {str(device)!r}, so nothing was started; choose cuda, "
            "which gives every process its own GPU."
        )
    index, count = local_rank if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"process {local_rank} needs the GPU {index} but this machine has {count}, so nothing was started; start "
            "at most one process per GPU, or choose cpu."
        )
    return torch.device("cuda", index)
