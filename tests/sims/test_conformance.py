"""Everything in the catalogue keeps the contract."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np
import pytest

from sims.catalog import make
from tests.catalog_options import entries_that_run_here, needed_options
from vla_rl.contract.check import check_env
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, NonFiniteError

FEW = ("counting", "isolated", "lift", "multi_task")  # of each way to keep rows; what is declared, all are asked


@pytest.fixture(params=FEW, scope="module")
def env(request):
    """One for all tests; the first of them gets it as it was made."""
    made = make(request.param, num_envs=3, **needed_options(request.param))
    yield made
    made.close()


def test_a_step_before_the_first_reset_is_refused(env):
    env.reset([0, 2], [1, 2])
    with pytest.raises(ContractError, match="environment 1 was never reset"):
        env.step(np.zeros((3, 1, env.spec.action_dim)))


@pytest.mark.parametrize("name", entries_that_run_here())
def test_declared_equals_delivered(name):
    with closing(make(name, num_envs=2, **needed_options(name))) as made:
        delivers(made)


def delivers(made):
    assert len(check_env(made, seed=11)) == 7
    assert EnvSpec.from_json(json.loads(json.dumps(made.spec.to_json()))) == made.spec


def test_wrong_chunks_name_the_shape(env):
    env.reset([0, 1, 2], [1, 2, 3])
    wide, longest = env.spec.action_dim, env.spec.max_chunk
    for shape in [(3, wide), (2, 1, wide), (3, 1, wide + 1), (3, 0, wide), (3, longest + 1, wide)]:
        with pytest.raises(ContractError, match=r"shape .* nothing was executed"):
            env.step(np.zeros(shape))


def test_a_nan_in_an_active_row_names_row_action_and_step(env):
    env.reset([0, 1, 2], [1, 2, 3])
    env.step(np.zeros((3, 1, env.spec.action_dim)))
    chunk = np.zeros((3, 2, env.spec.action_dim))
    chunk[1, 1, 0] = np.inf
    with pytest.raises(NonFiniteError, match=r"action\[1,1,0\] is inf \(environment 1 at control step 2\)"):
        env.step(chunk)
    while not (step := env.step(np.zeros((3, 1, env.spec.action_dim)))).done[1]:
        assert (step.obs.time[~step.done] > 1).all()
    env.reset([0, 2], [1, 3])
    assert env.step(chunk).valid[1].sum() == 0


def test_a_row_given_twice_or_out_of_range_is_refused(env):
    for env_ids, seeds in [([0, 0], [1, 2]), ([3], [1]), ([-1], [1])]:
        with pytest.raises(ContractError, match="distinct ones of"):
            env.reset(env_ids, seeds)
    with pytest.raises(ContractError, match="one seed"):
        env.reset([0, 1], [1])


def test_a_snapshot_that_does_not_fit_is_refused(env):
    env.reset([0, 1, 2], [1, 2, 3])
    saved = env.snapshot([0, 1])
    with pytest.raises(ContractError, match="nothing was restored"):
        env.restore([0], saved)
    del saved["worker/time" if "worker/time" in saved else "time"]
    with pytest.raises(ContractError, match=r"\['time'\]"):
        env.restore([0, 1], saved)


def test_snapshots_hold_numbers_only(env):
    env.reset([0, 1, 2], [1, 2, 3])
    assert {array.dtype.kind for array in env.snapshot([0]).values()} <= set("biuf")


def test_observations_are_not_overwritten_later(env):
    first = env.reset([0, 1, 2], [1, 2, 3])
    arrays = [first.state, first.time, *first.images.values(), *first.extras.values()]
    kept = [array.copy() for array in arrays]
    env.step(np.full((3, 2, env.spec.action_dim), 0.02))
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, kept, strict=True))


# Each is asked of an environment, of another file's too.
CHECKS = [
    test_a_step_before_the_first_reset_is_refused,
    delivers,
    test_wrong_chunks_name_the_shape,
    test_a_nan_in_an_active_row_names_row_action_and_step,
    test_a_row_given_twice_or_out_of_range_is_refused,
    test_a_snapshot_that_does_not_fit_is_refused,
    test_snapshots_hold_numbers_only,
    test_observations_are_not_overwritten_later,
]
