"""An evaluation by worker processes says what one in this process says, in the order of the seeds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import Evaluator
from vla_rl.recipes.workers import worker_processes, workers

SEEDS = [*range(100, 111), 7]


@pytest.fixture(autouse=True, scope="module")
def processes():
    """They take seconds to start, so all tests share them."""
    with pytest.MonkeyPatch.context() as patch, worker_processes(""):
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        yield


def straggler() -> GaussianPolicy:
    """A policy of random weights that reaches the goal from some places only."""
    torch.manual_seed(3)
    return GaussianPolicy(make("point_mass", num_envs=1).spec, config=GaussianConfig(1, width=32))


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.full) for count in (3, 50))])
def test_outcomes_do_not_depend_on_the_number_of_processes(count):
    env, policy, reports = EnvConfig("point_mass"), straggler(), []
    whole = evaluate(env.make(4), policy, SEEDS, 5)
    evaluator = Evaluator(env, 4, count)
    assert evaluator.env is None
    found = evaluator.evaluate(policy, SEEDS, 5, lambda *counts: reports.append(counts))
    for item in fields(whole):
        one, other = getattr(found, item.name), getattr(whole, item.name)
        same = np.allclose(one, other) if item.name == "returns" else np.array_equal(one, other)
        assert same and type(one) is type(other), item.name
    assert len(set(whole.returns.tolist())) > 6, "the order would not show"
    assert reports[-1] == (len(SEEDS), int(whole.success.sum())) and sorted(reports) == reports
    assert len(workers(1).all) == min(count, 4)


def test_one_process_is_this_one():
    evaluator = Evaluator(EnvConfig("point_mass"), 4, 1)
    assert evaluator.env.num_envs == 4
    assert len(evaluator.evaluate(straggler(), SEEDS, 5).success) == len(SEEDS)
    evaluator.close()


def test_what_other_processes_cannot_have_is_refused_with_the_cure():
    class Here:
        """Makes environments that exist here alone."""

    with pytest.raises(UserError, match="Here exists in this process alone"):
        Evaluator(Here(), 4, 2)
    with pytest.raises(UserError, match=r"AuditingPolicy has no save_pretrained.*evaluation.processes to 1"):
        Evaluator(EnvConfig("counting"), 4, 2).evaluate(AuditingPolicy(4), SEEDS, 5)


def test_an_error_in_a_process_is_raised_here():
    evaluator = Evaluator(EnvConfig("point_mass"), 4, 2)
    policy = straggler()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(UserError, match="non-finite action"):
        evaluator.evaluate(policy, SEEDS, 5)
    assert len(evaluator.evaluate(straggler(), SEEDS, 5).success) == len(SEEDS), "the processes go on"


@pytest.mark.full
def test_processes_end_with_the_run():
    with worker_processes("runs/before"):
        pass
    pool = workers(2)
    assert workers(1) is pool and len(pool.all) == 2, "those that run are used"
    with worker_processes("runs/inner"):
        pass
    assert not any(worker.alive for worker in pool.all)
    assert workers(1) is not pool
