"""EpisodeTracker: which causes terminate an episode and which truncate it."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.tracker import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, Causes, EpisodeTracker


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


def test_causes_are_codes_that_behave_as_a_tuple_of_strings():
    causes = Causes(np.array([0, 2, 1, 2], np.int8), ("", "success", "fell"))
    texts = ("", "fell", "success", "fell")
    assert causes == texts and texts == causes and list(texts) == causes and tuple(causes) == texts
    assert causes != texts[:3] and causes != ("", "fell", "success", "") and causes != "abcd"
    assert causes == Causes(causes.codes.copy(), causes.table) and causes != Causes(causes.codes[::-1], causes.table)
    assert causes == Causes(np.array([2, 1, 0, 1]), ("success", "fell", ""))  # another table
    assert causes[1] == "fell" and causes[-2] == "success" and causes[1:3] == ("fell", "success") and len(causes) == 4
    assert causes.count("fell") == 2 and causes.count("unheard of") == 0 and "success" in causes
    assert np.asarray(causes).tolist() == list(texts) and np.array(causes, object)[[1, 2]].tolist() == [
        "fell",
        "success",
    ]
    assert repr(causes) == repr(texts)


def test_the_causes_of_a_step_stay_as_they_were():
    book = EpisodeTracker(2)
    book.begin(np.arange(2), np.arange(2))
    running = book.flags()["cause"]
    book.end(np.array([1]), np.array([True]), np.array([SUCCESS]))
    assert running == ("", "") and book.flags()["cause"] == ("", "success")
