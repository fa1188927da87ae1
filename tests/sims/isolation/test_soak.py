"""A short soak; ``make soak`` runs the long one."""

from __future__ import annotations

import pytest

from tests.soak import KINDS, soak


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_workers_are_killed_and_hang_while_ppo_trains_and_nothing_is_lost(kind):
    found = soak(kind, 10, seed=3, deadlines={"deadline_s": 5.0, "start_deadline_s": 30.0})  # on a busy machine, too
    assert found["kills"] == 10 and found["lost"] == 0, found
    # A worker that is hit while it starts truncates nothing, and one that is hit twice is replaced once.
    assert found["restarts"] >= 5 and found["truncated_by_worker"] >= 1 and found["episodes"] > 20, found
    assert found["finite"] and found["updates"] > 5
    assert [sample["kills"] for sample in found["held"]][:: len(found["held"]) - 1] == [0, 10]
