"""Where worker processes are started."""

from __future__ import annotations

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.recipes.workers import Engine, new_engine, on_engine, workers


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
    engine = Small()
    with on_engine(engine):
        pool = workers(1)
        assert pool.engine is engine and not pool.all[0].lost
        with pytest.raises(UserError, match="room for one"):
            workers(2)
    assert engine.closed == 1 and pool.all[0].lost
    with on_engine(Engine()):
        assert isinstance(workers(0).engine, Engine)
