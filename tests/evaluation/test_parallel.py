"""An evaluation in threads has the outcomes of one without, in the order of the seeds."""

from __future__ import annotations

import threading
from dataclasses import fields

import numpy as np
import pytest

from sims.catalog import make
from tests.auditing import AuditingPolicy
from vla_rl.evaluation.parallel import evaluate_in_threads
from vla_rl.evaluation.run import evaluate

SEEDS = [*range(100, 111), 7]


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_outcomes_do_not_depend_on_the_number_of_threads(threads):
    whole = evaluate(make("counting", num_envs=4), AuditingPolicy(4), SEEDS, 5)
    used, sizes, reports = set(), [], []

    def make_env(num_envs):
        used.add(threading.current_thread().name)
        sizes.append(num_envs)
        return make("counting", num_envs=num_envs)

    found = evaluate_in_threads(
        make_env, 4, threads, AuditingPolicy(4), SEEDS, 5, lambda *counts: reports.append(counts)
    )
    for item in fields(whole):
        assert np.array_equal(getattr(found, item.name), getattr(whole, item.name)), item.name
    number = min(threads, 4)
    assert len(sizes) == number and set(sizes) == {4 // number}
    assert (threading.current_thread().name in used) == (threads == 1)  # which needs no thread of its own
    assert reports[-1] == (len(SEEDS), int(whole.success.sum())) and sorted(reports) == reports
