"""Faults in where a run computes, what it publishes, and how it keeps its folder."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DEVICE, _NAMES = "vla_rl/training/device.py", "tests/training/test_device.py::"

FAULTS = (
    Fault(
        "all processes share the first GPU",
        _DEVICE,
        "index, count = local_rank if device.index is None else device.index,",
        "index, count = device.index or 0,",
        (f"{_NAMES}test_every_process_gets_its_own_gpu[cuda]",),
    ),
    Fault(
        "processes share a GPU that is named by its index",
        _DEVICE,
        "device.index is not None and processes > 1",
        "device.index is None and processes < 1",
        (f"{_NAMES}test_a_device_that_cannot_be_used_is_refused",),
    ),
    Fault(
        "a GPU beyond the last one is accepted",
        _DEVICE,
        "if index >= count:",
        "if index > count:",
        (f"{_NAMES}test_a_device_that_cannot_be_used_is_refused",),
    ),
)
