"""Success while exploring in windows, from the metrics of a run."""

from __future__ import annotations

import pytest

from vla_rl.recipes.improve import exploring, windows


def row(steps: int, successes: float, episodes: float) -> dict[str, float]:
    return {"env/steps_total": steps, "rollout/successes": successes, "rollout/episodes": episodes}


ROWS = [
    {"env/steps_total": 0, "eval/score": 0.5},
    row(10, 3, 5),
    row(20, 1, 6),
    row(30, 0, 9),
    row(40, 2, 11),
    row(50, 9, 9),
]


def test_windows_end_with_the_iteration_in_which_they_are_full():
    """Of ten: 4 of 11 by step 20, 2 of 20 by step 40 (9 were too few); the last nine are none."""
    assert windows(ROWS, 10) == [(pytest.approx(4 / 11), 11, 20), (pytest.approx(0.1), 20, 40)]


def test_the_summary_names_the_first_the_lowest_and_the_last():
    rows = [row(steps, successes, 64) for steps, successes in ((100, 48), (200, 32), (300, 56))]
    found = exploring(rows)["exploring"]
    assert found == {"windows": 3, "episodes": 64, "first": 0.75, "lowest": 0.5, "lowest_at": 200, "last": 0.875}
    assert exploring(ROWS) == {}
