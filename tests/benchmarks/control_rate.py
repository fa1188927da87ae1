"""How punctual the control process of a robot is while a policy infers beside it."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import closing

import numpy as np
import torch

from robot_drivers.runtime import ControlProcess
from tests.benchmarks.measure import Row, time_row
from tests.robot_drivers.arms import HZ, config


def executor_jitter(quick: bool = False) -> list[Row]:
    """How late control steps at 50 Hz begin: the 99th percentile, in ms, and as a share of the period.

    Ours is beside a policy that infers all the time: matrix products on as many threads as there are cores.  The other
    side is the same process beside nobody.
    """
    steps, size = (10, 32) if quick else (1500, 1024)
    alone, beside = (_lateness(steps, size, busy) for busy in (False, True))
    detail = {
        "share_of_period": round(float(np.quantile(beside, 0.99)) * HZ, 4),
        "largest_ms": round(1e3 * float(beside.max()), 3),
        "steps": steps,
        "cores": len(os.sched_getaffinity(0)),
    }
    seconds = (float(np.quantile(beside, 0.99)), float(np.quantile(alone, 0.99)))
    return [time_row("executor_jitter", "executor_jitter", seconds, **detail)]


def _lateness(steps: int, size: int, busy: bool) -> np.ndarray:
    """Seconds after its deadline that each of ``steps`` control steps began."""
    weight, done, threads = torch.randn(size, size), threading.Event(), torch.get_num_threads()

    def infer() -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        while not done.is_set():
            torch.tanh(weight @ weight)

    policy = threading.Thread(target=infer)
    with tempfile.TemporaryDirectory() as folder, closing(ControlProcess(config(f"{folder}/commands"))) as control:
        if busy:
            policy.start()
        try:
            return np.array([_late(control) for _ in range(steps)])
        finally:
            done.set()
            if busy:
                policy.join()
            torch.set_num_threads(threads)


def _late(control: ControlProcess) -> float:
    report = control.receive()
    assert report is not None
    return report.late
