"""Faults in worlds that learn and dream on another device than the host."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _ON_DEVICE = "world_models/env.py", "tests/world_models/test_device.py::"

FAULTS = (
    Fault(
        "noise stays where it is drawn",
        _ENV,
        "known, self._there(noise))",
        "known, torch.from_numpy(noise))",
        (f"{_ON_DEVICE}test_dreams_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "what a step says stays on the host",
        _ENV,
        "action, frames).mapped(self._told)",
        "action, frames)",
        (f"{_ON_DEVICE}test_dreams_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "a rollout lies where the dreams are",
        "vla_rl/experience/rollout.py",
        "device=decision.out.sample.device",
        "device='cpu'",
        (f"{_ON_DEVICE}test_what_is_collected_there_is_where_the_policy_is",),
    ),
    Fault(
        "a world learns from where its episodes are",
        "vla_rl/training/world_model.py",
        "torch.from_numpy(item).to(device)",
        "torch.from_numpy(item)",
        (f"{_ON_DEVICE}test_a_world_learnt_there_is_the_one_learnt_on_the_host",),
    ),
)
