"""Deadlines without drift, on a clock of the test's own."""

from __future__ import annotations

import time

import pytest

from robot_drivers.control import Pace


def test_missed_steps_are_left_out_and_do_not_come_in_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    pace, begun = Pace(0.1), []
    for spent in (0.02, 0.13, 0.02, 0.57, 0.01, 0.01):  # seconds that a step takes; the fourth misses others
        clock[0] += spent
        pace.wait()
        begun.append(round(clock[0] - 100.0, 6))
    assert begun == pytest.approx([0.1, 0.23, 0.3, 0.87, 0.9, 1.0])
    assert pace.overruns == 4
