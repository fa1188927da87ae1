"""Data parallelism by torchrun: every process plays its own rows, and together they take one optimiser's steps.

The minibatches are those of one process that had all the rows (they are drawn from all decisions, by generators that
are the same everywhere), gradients and statistics are summed, and every process takes the same step; so the weights
are those of one process up to the order of summation.  Start it with

    torchrun --nproc-per-node 2 -m vla_rl.cli train CONFIG
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, OneProcess, Reducer, Rollout


class ProcessGroup:
    """The ``Reducer`` of a torchrun's processes: gloo on CPUs, nccl where every process has a GPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all processes, on the device that they came from."""
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One message for all gradients of a step."""
        held = list(parameters)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
        total = self.sum(torch.cat([part.flatten() for part in parts]))
        for parameter, part in zip(held, total.split([p.numel() for p in held]), strict=True):
            parameter.grad = part.view_as(parameter)


class SummedCounters:
    """A source whose ``info`` counts what all processes collected; seconds are those of the average process."""

    def __init__(self, source: ExperienceSource, reducer: Reducer) -> None:
        self.source, self.reducer = source, reducer

    def next(self) -> Rollout:
        """The rollout of this process's rows."""
        rollout = self.source.next()
        names = sorted(rollout.info)
        total = self.reducer.sum(torch.tensor([rollout.info[name] for name in names], dtype=torch.float64)).tolist()
        info = {n: v / self.reducer.size if n.endswith("_s") else v for n, v in zip(names, total, strict=True)}
        return replace(rollout, info=info)


def current_reducer() -> Reducer:
    """What joins this process with those that torchrun started beside it, if it did."""
    return ProcessGroup() if dist.is_available() and dist.is_initialized() else OneProcess()


def barrier(reducer: Reducer) -> None:
    """Return when every process has come here."""
    reducer.sum(torch.zeros(1, dtype=torch.float64))


@contextmanager
def torchrun_processes() -> Iterator[Reducer]:
    """The processes that torchrun started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield OneProcess()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield ProcessGroup()
    finally:
        dist.destroy_process_group()
