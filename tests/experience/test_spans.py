"""Spans: what a driver did when, bounded, and in whose lane."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from tests.experience.test_rollout import source
from vla_rl.experience import driver
from vla_rl.experience.driver import KINDS, LIMIT, OWN, Spans, joined, now, thinned
from vla_rl.experience.sources import Collectors, saved_rollout


def seconds(found) -> dict[str, float]:
    rows = np.asarray(found)
    return {kind: float(sum(b - a for k, a, b in rows if KINDS[int(k)] == kind)) for kind in KINDS}


def test_spans_of_one_kind_that_touch_are_one_and_taking_them_begins_anew():
    recorder = Spans()
    for kind, start, stop in (("inferring", 1.0, 2.0), ("inferring", 2.00001, 3.0), ("simulating", 3.0, 4.0)):
        recorder.add(kind, start, stop)
    recorder.add("simulating", 4.5, 5.0)
    taken = recorder.take()[OWN]
    assert [KINDS[int(kind)] for kind in taken[:, 0]] == ["inferring", "simulating", "simulating"]
    assert np.allclose(taken[:, 1:] - driver._ZERO, [[1, 3], [3, 4], [4.5, 5]])
    assert recorder.take()[OWN].shape == (0, 3)


def test_too_many_spans_become_fewer_with_the_same_seconds_in_order():
    kinds = itertools.cycle(("inferring", "syncing", "simulating"))
    recorder, wanted, at = Spans(), dict.fromkeys(KINDS, 0.0), 0.0
    for i, kind in zip(range(5 * LIMIT), kinds, strict=False):
        length = 0.01 + 0.001 * (i % 7)
        recorder.add(kind, at, at + length)
        wanted[kind] += length
        at += length + 0.002
    taken = recorder.take()[OWN]
    assert len(taken) <= LIMIT
    assert seconds(taken) == pytest.approx(wanted, rel=1e-5)
    assert (taken[1:, 1] >= taken[:-1, 2] - 1e-6).all() and taken[-1, 2] - driver._ZERO <= at


def test_thinning_by_hand():
    """Four spans in the first of 64 parts, one in the last: the order in a part is lost, its seconds are not."""
    found = thinned([(1, 0.0, 1.0), (2, 1.0, 2.0), (1, 2.5, 3.0), (2, 3.0, 5.0), (1, 639.0, 640.0)])
    assert found == [(1, 0.0, 1.5), (2, 1.5, 4.5), (1, 639.0, 640.0)]


def test_a_rollout_brings_the_spans_of_its_collection_and_no_metric_more():
    maker, before = source(4, 6), now()
    rollout, after = maker.next(), now()
    found = rollout.spans[OWN]
    assert set(rollout.spans) == {OWN} and not any("span" in name for name in rollout.info)
    assert before <= found[0, 1] and found[-1, 2] <= after and (found[:, 2] >= found[:, 1]).all()
    assert {KINDS[int(kind)] for kind in found[:, 0]} >= {"simulating", "inferring"}
    info = rollout.info
    assert seconds(found)["simulating"] == pytest.approx(info["time/env_s"], rel=0.05, abs=1e-3)
    assert maker.next().spans[OWN][0, 1] >= found[-1, 2], "the next rollout has its own"


def test_collectors_beside_have_lanes_of_their_own_and_the_learner_waits():
    background = Collectors([source(4, 6), source(4, 6)], source(4, 6).policy)
    asked = now()
    rollout = background.next()
    background.close()
    assert list(rollout.spans) == [OWN, "collector 1", "collector 2"]
    (kind, start, stop), *more = rollout.spans[OWN]
    assert not more and KINDS[int(kind)] == "waiting" and asked <= start + 1e-3
    assert all(start <= spans[0, 1] and spans[-1, 2] <= stop for name, spans in rollout.spans.items() if name)


def test_a_saved_rollout_has_no_spans():
    assert saved_rollout(source(4, 6).next())["spans"] == {}


def test_drivers_that_take_turns_share_a_lane_in_order_of_time():
    one, other = np.array([[1, 0.0, 1.0], [2, 3.0, 4.0]]), np.array([[2, 1.0, 3.0]])
    assert joined([{OWN: one}, {OWN: torch.from_numpy(other)}])[OWN][:, 1].tolist() == [0.0, 1.0, 3.0]


def test_the_clock_of_spans_is_the_wall_clock():
    assert now() == pytest.approx(time.time(), abs=1.0)
