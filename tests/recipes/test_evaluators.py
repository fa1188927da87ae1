"""Worker processes: an evaluation by them says what one in this process says, and where they are started."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import Evaluator
from vla_rl.recipes.workers import Engine, close_workers, new_engine, on_engine, worker_processes, workers
from vla_rl.training.device import ALONE

SEEDS = [*range(100, 111), 7]


@pytest.fixture(autouse=True, scope="module")
def processes():
    """They take seconds to start, so all tests share them."""
    with pytest.MonkeyPatch.context() as patch, worker_processes(""):
        for name, value in {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "2"}.items():
            patch.setenv(name, value)
        yield


def straggler() -> GaussianPolicy:
    """A policy of random weights that reaches the goal from some places only."""
    torch.manual_seed(3)
    return GaussianPolicy(make("point_mass", num_envs=1).spec, config=GaussianConfig(1, width=32))


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3, 50])
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


def test_processes_compute_with_one_thread():
    """Whatever this one was given."""
    worker = workers(1).all[0]
    number = worker.make("tests.experience.makers:Counter", start=0)
    assert worker.call(number, "variable", name=ALONE) == worker.call(number, "threads") == "1"


def test_one_process_is_this_one():
    evaluator = Evaluator(EnvConfig("point_mass"), 4, 1)
    assert evaluator.env.num_envs == 4
    assert len(evaluator.evaluate(straggler(), SEEDS, 5).success) == len(SEEDS)
    evaluator.close()


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


# -- where they are started --------------------------------------------------------------------------------------------


def test_a_mistake_is_one_sentence(complaint):
    with pytest.raises(UserError, match=r"no engine 'rai', so nothing was started; did you mean 'ray'\?"):
        new_engine("rai")
    with pytest.raises(UserError, match=r"--address head:6379 would change nothing; leave it out, or add --engine ray"):
        new_engine("local", "head:6379")
    with pytest.raises(UserError, match="--gpus 1 would change nothing"):
        new_engine("local", gpus=1.0)
    for gpus in (-1.0, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"Ray cannot give \S+ GPUs, so nothing was started; choose 0 to 1"):
            new_engine("ray", gpus=gpus)
    assert "--gpus 'two' is no number" in complaint("train", "demo.py:demo", "--gpus", "two")
    assert "no engine 'rai'" in complaint("train", "demo.py:demo", "--engine", "rai")


class Small(Engine):
    """Has room for one process, and notes what happens."""

    def __init__(self) -> None:
        self.closed = 0

    def require(self, workers: int) -> None:
        if workers > 1:
            raise UserError("there is room for one.")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.full
def test_an_engine_starts_the_processes_of_its_block():
    close_workers()  # those of the tests above
    engine = Small()
    with on_engine(engine):
        pool = workers(1)
        assert pool.engine is engine and not pool.all[0].lost
        with pytest.raises(UserError, match="room for one"):
            workers(2)
    assert engine.closed == 1 and pool.all[0].lost
    with on_engine(Engine()):
        assert isinstance(workers(0).engine, Engine)
