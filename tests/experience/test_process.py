"""A source in another process gives the rollouts of one in this process; its errors are one sentence."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.experience.makers import equal_rollouts, gaussian
from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.experience.process import ProcessSource, changing
from vla_rl.experience.worker import Pipes, Worker

MAKE = "tests.experience.makers:{}"
POINT_MASS = {"env": "point_mass", "num_envs": 16, "decisions": 16, "horizon": 1, "seed": 3}
COUNTING = {"env": "counting", "num_envs": 3, "decisions": 7, "horizon": 4, "seed": 5}


def remote(maker, worker, progress=lambda: 0.0, **arguments):
    """A source in ``worker``."""
    return ProcessSource(MAKE.format(maker), arguments, worker, progress)


def test_the_same_rollouts_bit_for_bit_with_new_weights(shared):
    """With their version and the progress of the run, too."""
    local, progress = gaussian(**COUNTING), iter([0.25, 0.5])
    source: ExperienceSource = remote("gaussian", shared, lambda: next(progress), **COUNTING)
    for version in (0, 4, 9):
        rollout = source.next()
        assert equal_rollouts(rollout, local.next()) and (rollout.version == version).all()
        assert rollout.valid.any() and rollout.info["env/steps"] == rollout.valid.sum()
        with torch.no_grad():
            for p in local.policy.parameters():
                p.mul_(0.9).add_(0.01)
        local.policy.version = {0: 4, 4: 9, 9: 10}[version]
        if version < 9:
            source.policy = local.policy
            assert source.policy is local.policy


def test_the_progress_of_the_run_is_sent_with_the_weights(shared):
    here, progress = gaussian(**POINT_MASS), iter([0.25, 0.5])
    source = remote("annealed", shared, lambda: next(progress), **POINT_MASS)
    assert source.next().info["progress"] == 0.0
    for expected in (0.25, 0.5):
        source.policy = here.policy
        assert source.next().info["progress"] == expected


def test_frozen_weights_are_not_sent():
    policy = gaussian(**POINT_MASS).policy
    assert changing(policy).keys() == {*policy.trainable(), *policy.state_dict()}
    kept = policy.trainable
    policy.trainable = lambda: {"log_std": kept()["log_std"]}
    buffers = {name for name, _ in policy.named_buffers()} & policy.state_dict().keys()
    assert changing(policy).keys() == {"log_std"} | buffers


def test_a_saved_source_continues_with_the_same_rollouts(shared):
    whole = gaussian(**COUNTING)
    expected = [whole.next() for _ in range(4)]
    source, resumed = (remote("gaussian", shared, **COUNTING) for _ in range(2))
    assert all(equal_rollouts(source.next(), rollout) for rollout in expected[:2])
    state = source.state_dict()
    source.next()
    resumed.load_state_dict(state)
    assert all(equal_rollouts(resumed.next(), rollout) for rollout in expected[2:])


def test_several_sources_share_a_process_that_outlives_them(shared):
    first, second = (ProcessSource(MAKE.format("gaussian"), item, shared) for item in (COUNTING, POINT_MASS))
    here = gaussian(**COUNTING), gaussian(**POINT_MASS)
    for _ in range(2):
        assert equal_rollouts(first.next(), here[0].next()) and equal_rollouts(second.next(), here[1].next())
    first.close()
    assert shared.alive and equal_rollouts(second.next(), here[1].next())


def test_weights_that_do_not_fit_are_refused(shared):
    source, other = remote("gaussian", shared, **POINT_MASS), gaussian(**COUNTING)
    before = source.next()
    source.policy = other.policy
    with pytest.raises(ContractError, match="nothing was published"):
        source.next()
    assert equal_rollouts(before, gaussian(**POINT_MASS).next()) and (source.next().version == 0).all()


def test_errors_of_the_acting_process_are_raised_in_the_learner(mortal, capfd):
    """Prints do no harm, an exception does not end the process, its death does."""
    source = remote("failing", mortal)
    assert source.next().reward.shape == (2, 2, 1)
    with pytest.raises(UserError, match="ZeroDivisionError: the wheel came off; the whole traceback is above"):
        source.next()
    with pytest.raises(NonFiniteError, match="non-finite action in environment 0"):
        source.next()
    for _ in range(2):
        with pytest.raises(UserError, match=r"makers:failing' was killed by SIGABRT during 'next'.*start it again"):
            source.next()
    source.close()
    mortal.close()
    with pytest.raises(UserError, match="was closed"):
        source.next()
    printed = capfd.readouterr()
    assert "Traceback" in printed.err and "a library that talks" in printed.err and "below Python" in printed.err
    assert printed.out == ""


SPEAKS = "import sys; from vla_rl.contract import wire; o, i = sys.stdout.buffer, sys.stdin.buffer; "
OTHER = SPEAKS + "wire.CONTRACT_VERSION = 99; wire.handshake(i, o, 'actor')"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (OTHER, r"'actor' speaks contract version 99 but 'learner' speaks 2"),
        ("print('Welcome to my simulator!')", r"holds b'Welcome to m' where a message should begin"),
        ("import sys; sys.exit(3)", "ended with exit code 3 during 'starting'"),
    ],
)
def test_a_process_that_is_no_actor_is_refused(code, message):
    with pytest.raises(UserError, match=message):
        ProcessSource("anything:at_all", {}, Worker(Pipes((sys.executable, "-c", code))))
