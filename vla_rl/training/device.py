"""The one device of a run: policy, critic, learner, replay and world model are on it, generators are on the host.

Which precision a device computes faster in: measured, because what a processor announces does not tell.

bfloat16 was 16 to 40 times slower than float32 on a processor without such instructions, where torch emulates it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.nn import functional

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


Precision = Literal["float32", "bfloat16"]
_BUDGET = 0.01  # seconds for each of the two
_CHANNELS, _SIDE, _BATCH = 64, 16, 8  # a layer of a small U-Net


def fastest_precision(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Precision:
    """The faster precision for a small convolution and a matrix product on ``device``; float32 when they are equal.

    Takes 20 ms, or two runs in each precision where these take longer.
    """
    seconds = {name: _fastest_run(device, dtype, clock) for name, dtype in _TYPES.items()}
    return "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"


_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _fastest_run(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Seconds of the fastest run after the first, which loads kernels."""
    image = torch.ones(_BATCH, _CHANNELS, _SIDE, _SIDE, device=device, dtype=dtype)
    kernel = torch.ones(_CHANNELS, _CHANNELS, 3, 3, device=device, dtype=dtype)
    matrix = torch.ones(_BATCH * _SIDE, _CHANNELS * _SIDE, device=device, dtype=dtype)
    begin, best, runs = clock(), float("inf"), 0
    with torch.no_grad():
        while runs < 2 or clock() - begin < _BUDGET:
            start = clock()
            functional.conv2d(image, kernel, padding=1)
            matrix @ matrix.T
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, clock() - start) if runs else best
            runs += 1
    return best


ALONE = "VLA_RL_THREADS"  # set by the command line, unless OMP_NUM_THREADS is given


@contextmanager
def alone() -> Iterator[None]:
    """Take as many threads as ``ALONE`` says, for a stage that nothing runs beside; without it nothing changes.

    Sums depend on the number of threads, so only equal numbers give equal bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get(ALONE, before)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def shared() -> Iterator[None]:
    """Let :func:`alone` take one thread within the block, because other processes compute meanwhile."""
    before = os.environ.get(ALONE)
    os.environ[ALONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ALONE]
        else:
            os.environ[ALONE] = before
