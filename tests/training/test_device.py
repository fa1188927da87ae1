"""Names of devices: what they resolve to, alone and under torchrun, and what is refused in one sentence."""

from __future__ import annotations

import pytest
import torch

from vla_rl.contract.errors import UserError
from vla_rl.training.device import resolve_device


def machine(monkeypatch, gpus: int, local_rank: int = 0, processes: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))


@pytest.mark.parametrize(
    ("name", "gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_a_name_is_the_device_it_says(name, gpus, device, monkeypatch):
    machine(monkeypatch, gpus)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_every_process_gets_its_own_gpu(name, monkeypatch):
    found = []
    for rank in range(3):
        machine(monkeypatch, 3, rank, 3)
        found.append(str(resolve_device(name)))
    assert found == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("name", "gpus", "rank", "processes", "why"),
    [
        ("cuda", 0, 0, 1, "torch finds no GPU"),
        ("cuda:2", 2, 0, 1, "needs the GPU 2 but this machine has 2"),
        ("cuda", 2, 2, 3, "process 2 needs the GPU 2"),
        ("cuda:0", 2, 0, 2, "2 processes on this machine would share 'cuda:0'"),
        ("gpu", 2, 0, 1, "there is no device 'gpu'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(name, gpus, rank, processes, why, monkeypatch):
    machine(monkeypatch, gpus, rank, processes)
    with pytest.raises(UserError, match=why):
        resolve_device(name)
