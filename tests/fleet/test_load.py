"""What the load test reports is right: how long acknowledgements take, and by how much memory grows."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from tests.fleet.load import _BINS, Waiting, share_within, slope


def test_the_time_of_an_acknowledgement_counts_from_when_its_record_was_due():
    counts = np.zeros(_BINS, np.int64)
    source = Waiting("arm", counts, b"payload")
    start = time.monotonic()
    for late in (0.0, 0.5, 30.0):
        source.put(start - late)
    assert [record.seq for record in source.unacknowledged(1, 100)] == [1, 2]
    source.acknowledged(1)
    assert (
        counts.sum() == 2 and share_within(counts, 0.4) < 0.2 and share_within(counts, 0.99) == pytest.approx(0.5, 0.1)
    )
    source.acknowledged(2)
    assert share_within(counts, 0.99) == pytest.approx(30, 0.1)
    assert source.unacknowledged(3, 100) == [] and source.first_seq == source.next_seq == 3


def test_without_an_acknowledgement_none_came_in_time():
    assert share_within(np.zeros(_BINS, np.int64), 0.5) == math.inf


def test_memory_is_judged_after_the_beginning_alone():
    samples = [(float(t), 100.0 + (50.0 if t > 3 else 10 * t) + 0.1 * t) for t in range(60)]
    assert slope(samples, 5.0) == pytest.approx(6.0)
