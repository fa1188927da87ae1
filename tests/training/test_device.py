"""Names of devices: what they resolve to, alone and under torchrun, and what is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine import calibrated_model
from vla_rl.training import device
from vla_rl.training.device import fastest_precision, resolve_device
from vla_rl.training.tracking import RunFolder


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


# -- the precision of a world model is measured once -------------------------------------------------------------------


CPU = torch.device("cpu")


class Clock:
    """A clock in which the operations of each precision take ``seconds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[torch.dtype, list[float]]) -> None:
        self.now, self.runs = 0.0, dict.fromkeys(seconds, 0)

        def conv2d(image: torch.Tensor, *given: object, **named: object) -> None:
            durations = seconds[image.dtype]
            self.now += durations[min(self.runs[image.dtype], len(durations) - 1)]
            self.runs[image.dtype] += 1

        monkeypatch.setattr(device.functional, "conv2d", conv2d)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("single", "half", "chosen"),
    [
        ([1e-3], [16e-3], "float32"),
        ([2e-3], [1e-3], "bfloat16"),
        ([1e-3], [1e-3], "float32"),
        ([1e-3], [5e-3, 0.5e-3], "bfloat16"),  # the first run loads kernels and does not count
        ([1e-3], [0.5e-3, 5e-3], "float32"),
        ([30.0], [60.0], "float32"),
    ],
)
def test_the_faster_precision_is_chosen(monkeypatch, single, half, chosen):
    clock = Clock(monkeypatch, {torch.float32: single, torch.bfloat16: half})
    assert fastest_precision(CPU, clock) == chosen
    assert all(count >= 2 for count in clock.runs.values())
    if max(single[0], half[0]) < 1.0:
        assert clock.now < 0.06, "about 20 ms in all"
    else:
        assert clock.runs == {torch.float32: 2, torch.bfloat16: 2}


def test_a_resumed_run_keeps_the_precision_that_was_measured(monkeypatch, tmp_path):
    plan = load_config("imagine.py:lift").plan
    assert plan.model.precision == load_config("rewards.py:imagined").plan.model.precision == "auto"
    folder = RunFolder(tmp_path / "run", {})
    for measured in ("bfloat16", "float32"):
        monkeypatch.setattr(calibrated_model, "fastest_precision", lambda device, measured=measured: measured)
        assert calibrated_model._precision(folder, plan, torch.device("cpu")) == "bfloat16"
    single = replace(plan, model=replace(plan.model, precision="float32"))
    assert calibrated_model._precision(folder, single, torch.device("cpu")) == "float32"
    folder.close()
