"""Data parallelism by torchrun: every process steps its own environments, and all take the same optimizer steps.

The minibatches are those of one process with all environments: they are drawn from all decisions, by generators with
the same state in every process.  Gradients and statistics are summed, so the weights are those of one process up to the
order of summation.  Start it with

    torchrun --nproc-per-node 2 -m vla_rl.cli train CONFIG
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, OneProcess, Reducer, Resumable, Rollout

HOST = torch.device("cpu")


class ProcessGroup:
    """The ``Reducer`` of a torchrun's processes: gloo on CPUs, nccl where every process has a GPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else HOST

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all processes, on the device that they came from."""
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One message for all gradients of a step."""
        trained = list(parameters)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        total = self.sum(torch.cat([part.flatten() for part in parts]))
        for parameter, part in zip(trained, total.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.view_as(parameter)

    def passes(self, own: int) -> int:
        """``own``: every process holds all weights."""
        return own


class SummedCounters:
    """A source whose ``info`` holds the sums of all processes' counters and the mean of their seconds (``*_s``).

    It is ``Resumable`` if the source of this process is.
    """

    def __init__(self, source: ExperienceSource, reducer: Reducer) -> None:
        self.source, self.reducer = source, reducer
        if isinstance(source, Resumable):
            self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def next(self) -> Rollout:
        """The rollout of this process's environments."""
        rollout = self.source.next()
        names = sorted(rollout.info)
        total = self.reducer.sum(torch.tensor([rollout.info[name] for name in names], dtype=torch.float64)).tolist()
        info = {n: v / self.reducer.size if n.endswith("_s") else v for n, v in zip(names, total, strict=True)}
        return replace(rollout, info=info)


def current_reducer() -> Reducer:
    """The reducer over torchrun's processes, or that of one process."""
    return ProcessGroup() if dist.is_available() and dist.is_initialized() else OneProcess()


def barrier(reducer: Reducer) -> None:
    """Return when every process has called it."""
    reducer.sum(torch.zeros(1, dtype=torch.float64))


def anyone(asked: Callable[[], bool], group: Reducer) -> bool:
    """Whether one of the processes of ``group`` was asked, which all of them call at once: they stop together."""
    return float(group.sum(torch.tensor(float(asked()), dtype=torch.float64))) > 0


@contextmanager
def torchrun_processes(device: torch.device = HOST) -> Iterator[Reducer]:
    """The processes that torchrun started, or this one alone; ``device`` is where this one computes (resolve_device).

    Processes with a GPU each sum over nccl, all others over gloo.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield OneProcess()
        return
    # The group that exists when this module is first imported is the default argument of its functions, so it is never
    # freed: its threads would outlive destroy_process_group and abort a process that is ending.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ProcessGroup()
    finally:
        dist.destroy_process_group()
