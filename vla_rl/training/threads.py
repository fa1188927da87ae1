"""How many threads torch computes with in a stage that has the machine to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
