"""A short soak (``make soak`` runs the long one), and that its audit finds what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.experience.makers import gaussian
from tests.soak import KINDS, Audit, Sample, is_flat, soak


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind == "remote")) for kind in KINDS])
@pytest.mark.full
def test_workers_are_killed_and_hang_while_ppo_trains_and_nothing_is_lost(kind, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    found = soak(kind, 10, seed=3, deadlines={"deadline_s": 5.0, "start_deadline_s": 30.0})  # on a busy machine, too
    assert found["kills"] == 10 and found["lost"] == 0, found
    # A worker that is hit while it starts truncates nothing, and one that is hit twice is replaced once.
    assert found["restarts"] >= 5 and found["truncated_by_worker"] >= 1 and found["episodes"] > 20, found
    assert found["finite"] and found["updates"] > 5
    assert [sample["kills"] for sample in found["held"]][:: len(found["held"]) - 1] == [0, 10]


def test_memory_and_files_that_grow_are_noticed():
    before, grown, leaking = Sample(100, 500.0, 60), Sample(1000, 560.0, 60), Sample(1000, 500.0, 90)
    assert is_flat([before, before]) and not is_flat([before, grown]) and not is_flat([before, leaking])


@pytest.fixture
def rollouts():
    source = gaussian("counting", 3, 12, 4, 0)
    return [source.next() for _ in range(4)], source


def audited(*rollouts):
    audit = Audit()
    for rollout in rollouts:
        audit.add(rollout)
    return audit


def test_the_audit_misses_nothing(rollouts):
    made, source = rollouts
    audit = audited(*made)
    assert audit.lost(source) == 0 and not audit.wrong and len(audit.whole) > 5
    assert audited(*made[:2], made[3]).wrong, "a window is missing"
    assert audited(made[0], *made).wrong, "a window came twice"
    rewards = made[1].reward.clone()
    rewards[3, 1] = 0
    assert audited(made[0], replace(made[1], reward=rewards)).wrong, "a reward is missing"
    next(source.seeds)
    assert audit.lost(source) == 1, "an episode that nobody saw"
    audit.whole.append(audit.whole[0])
    assert audit.lost(source) == 2, "an episode that was seen twice"
