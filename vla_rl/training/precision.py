"""Which precision a device computes faster in: measured, because what a processor announces does not tell.

bfloat16 was 16 to 40 times slower than float32 on a processor without such instructions, where torch emulates it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional

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
