"""Prequential AUROC by hand: ties, decisions at the same time only, what is decided already; and whole episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.off_policy_toys import seeded
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.toys import rollout
from vla_rl.algorithms.ranking import Attempt, Attempts, RecentAttempts, auroc
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.residual import DeterministicResidual


def attempt(score: list[float], success: bool, steps: int | None = None, every: int = 1) -> Attempt:
    time = every * np.arange(len(score))
    return Attempt(time, np.array(score, np.float32), steps or every * len(score), success, True)


def test_pairs_at_the_same_time_by_hand():
    """At time 0: .5 beats .3 and ties .5; .2 loses both.  At time 1: .9 beats .1; the other failure is over."""
    attempts = [attempt([0.5, 0.9], True), attempt([0.2], True), attempt([0.3, 0.1], False), attempt([0.5], False)]
    share, pairs = auroc(attempts, 0)
    assert pairs == 5 and share == pytest.approx((1.5 + 0 + 1) / 5)


def test_time_alone_ranks_nothing():
    """A critic that only knows how late it is: pooled over time it would rank 3/4 of the pairs."""
    early = [attempt([1.0, 0.5], True), attempt([1.0, 0.5, 0.0, -0.5], False)]
    assert auroc(early, 0) == (0.5, 2)


def test_what_is_decided_is_left_out_of_successes_and_failures():
    """The last two control steps of each: the success counts at time 0 only, the failure at times 0 and 1."""
    attempts = [attempt([0.1, 0.9, 0.9], True), attempt([0.2, 0.0, 0.0, 0.0], False)]
    assert auroc(attempts, 0) == (pytest.approx(2 / 3), 3)
    assert auroc(attempts, 2) == (0.0, 1)
    assert auroc(attempts, 3) == (0.5, 0), "no pair is left, so nothing is known"


def test_time_counts_control_steps_of_chunks():
    """Of chunks of five actions the second begins at step 5: with 6 steps in all it is within the last 5."""
    attempts = [attempt([0.1, 0.9], True, 6, 5), attempt([0.2, 0.0], False, 10, 5)]
    assert auroc(attempts, 0) == (0.5, 2) and auroc(attempts, 1) == (0.0, 1)


def decided(num_envs: int, **changes) -> Rollout:
    action = torch.zeros(num_envs, 1, 1)
    out = ActionOut(action, action, torch.zeros(num_envs))
    return rollout({"state": torch.zeros(2, num_envs, 1)}, out, torch.zeros(1, num_envs, 1), **changes)


def test_episodes_are_assembled_across_windows():
    """Env 0 goes on and succeeds, env 1 is broken off (its seed changes), env 2 ends by a breakdown, env 3 in time."""
    attempts, no = Attempts(), torch.zeros(1, 4, dtype=torch.bool)
    first = decided(4, terminated=no, seeds=torch.tensor([[7, 8, 9, 10]]), aux={"corrected": ~no})
    assert attempts.add(first, torch.tensor([[0.1, 0.2, 0.3, 0.4]])) == []
    valid = torch.tensor([True, True, False, True]).view(1, 4, 1)
    end = torch.tensor([[True, False, True, True]])
    more = {"terminated": end, "success": end, "valid": valid, "seeds": torch.tensor([[7, 11, 9, 10]])}
    one, two = attempts.add(decided(4, aux={"corrected": no}, **more), torch.tensor([[0.5, 0.6, 0.7, 0.8]]))
    assert one.time.tolist() == [0, 1] and one.steps == 2 and one.success and one.corrected
    np.testing.assert_allclose(one.score, [0.1, 0.5])
    np.testing.assert_allclose(two.score, [0.4, 0.8])
    later = attempts.add(decided(4, seeds=torch.tensor([[12, 11, 9, 13]])), torch.zeros(1, 4))
    assert [item.steps for item in later] == [1, 2, 1, 1], "the breakdown left nothing behind"
    assert not later[0].success


def test_chunks_count_their_control_steps():
    """Two chunks of three actions, of which the second is cut after two: the episode has five."""
    attempts, valid = Attempts(), torch.ones(1, 1, 3, dtype=torch.bool)
    begun = decided(1, valid=valid, terminated=torch.zeros(1, 1, dtype=torch.bool))
    assert attempts.add(begun, torch.zeros(1, 1)) == []
    cut = torch.tensor([True, True, False]).view(1, 1, 3)
    (one,) = attempts.add(decided(1, valid=cut), torch.zeros(1, 1))
    assert one.steps == 5 and one.time.tolist() == [0, 3]


def test_streams_do_not_continue_each_others_episodes():
    attempts, no = Attempts(), torch.zeros(1, 1, dtype=torch.bool)
    assert attempts.add(decided(1, terminated=no, stream="a"), torch.zeros(1, 1)) == []
    assert [item.steps for item in attempts.add(decided(1, stream="b"), torch.zeros(1, 1))] == [1]
    assert [item.steps for item in attempts.add(decided(1, stream="a"), torch.zeros(1, 1))] == [2]


def test_a_resumed_ranking_goes_on_alike():
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), SMALL)
    source = RolloutSource(make("point_mass", num_envs=4), policy, 7, SeedStream(0, 10**9), seeded(1))
    one, two, kept, resumed = Attempts(), Attempts(), RecentAttempts(5), RecentAttempts(5)
    for turn in range(9):
        found = source.next()
        score = torch.randn(7, 4, generator=seeded(turn))
        if turn == 4:
            two.load_state_dict(one.state_dict())
            resumed.load_state_dict(kept.state_dict())
        new = one.add(found, score)
        kept.attempts.extend(new)
        if turn >= 4:
            resumed.attempts.extend(two.add(found, score))
    assert len(kept.attempts) == 5
    for a, b in zip(kept.attempts, resumed.attempts, strict=True):
        assert (a.time == b.time).all() and (a.score == b.score).all()
        assert (a.steps, a.success, a.corrected) == (b.steps, b.success, b.corrected)
