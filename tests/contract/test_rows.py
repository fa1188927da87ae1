"""EpisodeTracker: which causes terminate an episode and which truncate it."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.rows import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, EpisodeTracker


@pytest.mark.parametrize(
    "cause, name, terminated, truncated",
    [
        (0, "", False, False),
        (SUCCESS, "success", True, False),
        (TIME_LIMIT, "time_limit", False, True),
        (DIVERGED, "diverged", False, True),
        (FAILURES, "fell", True, False),
        (FAILURES + 1, "broke", True, False),
        (FAILURES + 2, "uncertainty", False, True),
    ],
)
def test_a_cause_terminates_or_truncates(cause, name, terminated, truncated):
    book = EpisodeTracker(3, failures=("fell", "broke"), cuts=("uncertainty",))
    book.begin(np.arange(3), np.arange(3))
    book.end(np.array([1]), np.array([cause == SUCCESS]), np.array([cause]))
    flags = book.flags()
    assert flags["cause"] == ("", name, "")
    assert flags["terminated"].tolist() == [False, terminated, False]
    assert flags["truncated"].tolist() == [False, truncated, False]
    assert flags["success"].tolist() == [False, cause == SUCCESS, False]
    assert book.done.tolist() == [False, cause != 0, False]
