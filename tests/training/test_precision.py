"""The precision of a world model is measured once: a device without bfloat16 instructions keeps float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine import calibrated_model
from vla_rl.training import device
from vla_rl.training.device import fastest_precision
from vla_rl.training.tracking import RunFolder

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
def test_the_faster_precision_is_chosen_and_the_first_run_does_not_count(monkeypatch, single, half, chosen):
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
