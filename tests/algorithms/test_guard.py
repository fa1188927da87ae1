"""The actor is released when the critics foresee outcomes, held when they stop, and returns when it falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.by_hand import build
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.toys import rollout, seeded
from vla_rl.algorithms.guard import (
    Attempt,
    Attempts,
    Fallback,
    FallbackConfig,
    Release,
    ReleaseConfig,
    auroc,
)
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import BlendConfig, DeterministicResidual
from vla_rl.training.checkpoint import latest_state, save_state

GATE = ReleaseConfig(auroc=0.8, hold=0.6, episodes=20, least=4, decided=0)
BACK = FallbackConfig(base_episodes=8, episodes=8, least=1, wait=6)


def attempts(outcomes: Sequence[int], scores: Sequence[float] = (), corrected: bool = True) -> list[Attempt]:
    """Episodes of one decision each."""
    shown = scores or [0.0] * len(outcomes)
    return [
        Attempt(np.zeros(1, int), np.array([score], np.float32), 1, bool(good), corrected)
        for good, score in zip(outcomes, shown, strict=True)
    ]


def ended(outcomes: Sequence[int], corrected: Sequence[int] | None = None) -> Rollout:
    """A rollout of one decision in each environment, which ends its episode."""
    count = len(outcomes)
    state, action = torch.randn(2, count, 2, generator=seeded(1)), torch.randn(count, 1, 2, generator=seeded(2))
    out = ActionOut(action, action, torch.zeros(count))
    aux = {} if corrected is None else {"corrected": torch.tensor([corrected], dtype=torch.bool)}
    success = torch.tensor([outcomes], dtype=torch.bool)
    return rollout({"state": state}, out, torch.zeros(1, count, 1), success=success, aux=aux)


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_the_gate_opens_at_one_share_and_closes_below_another():
    """Ten failures scored 0 to .9; successes that beat 5, 7 and 9 of them: .5, .7 and .9 of the pairs."""
    gate, failures = Release(GATE), [0.1 * i - 0.05 for i in range(1, 11)]

    def shown(beaten: int) -> bool:
        gate.add(attempts([0] * 10 + [1] * 10, [*failures, *[0.1 * beaten] * 10]))
        assert gate.share == pytest.approx(beaten / 10)
        return gate.open

    assert [shown(beaten) for beaten in (5, 7, 9, 7, 6, 5, 7, 8)] == [0, 0, 1, 1, 1, 0, 0, 1]


def test_few_outcomes_of_a_kind_decide_nothing():
    gate = Release(GATE)
    gate.add(attempts([1] * 17 + [0] * 3, [1.0] * 17 + [0.0] * 3))
    assert gate.share == 1 and not gate.open
    gate.add(attempts([0], [0.0]))
    assert gate.open


def test_a_held_actor_stays_while_the_critics_learn():
    td3 = build(release=GATE, critic_warmup=0, policy_delay=1, learning_starts=1)
    td3.critic.forward = (lambda forward: lambda features, action: forward(features, action))(td3.critic.forward)
    before, critic = td3.policy.w.detach().clone(), td3.critic.last.bias.detach().clone()
    info = td3.update(ended([0, 1] * 4))
    assert torch.equal(before, td3.policy.w) and not torch.equal(critic, td3.critic.last.bias)
    assert info["policy/free"] == 0 and td3.guard.released == 0
    td3.guard.release.open = True
    td3.guard.release.add = lambda found: None
    info = td3.update(ended([0, 1] * 4))
    assert not torch.equal(before, td3.policy.w) and info["policy/free"] == 1


def test_decisions_are_scored_before_they_are_learnt_from():
    """The scores are those of the critics before the update, and the replay buffer has not grown yet."""
    td3 = build(release=GATE, learning_starts=1)
    found, seen = ended([0, 1, 1, 0]), []
    td3.replay.add = lambda rollout: seen.append([one.success for one in td3.guard.release.recent]) or 0
    with torch.no_grad():
        expected = td3.critic({"state": found.features["state"][0]}, found.executed[0].flatten(1)).mean(0)
    td3.update(found)
    assert seen == [[False, True, True, False]] and td3.steps == 2
    np.testing.assert_allclose(np.concatenate([a.score for a in td3.guard.release.recent]), expected.numpy())


# -- the return to the base -------------------------------------------------------------------------------------------


def test_the_base_is_counted_before_and_beside_the_actor():
    fallback = Fallback(BACK)
    fallback.add(attempts([1, 1, 0, 1]))
    assert fallback.base == [3, 4] and not fallback.ready
    fallback.moved = True
    fallback.add(attempts([1, 0, 0, 0], corrected=False))
    fallback.add(attempts([0]))
    assert fallback.base == [4, 8] and fallback.ready and list(fallback.latest) == [False]


def test_it_returns_only_when_the_interval_lies_below_the_base():
    """Base 6 of 8.  Wilson's upper end (z 1.64) of 0 in 1 is .73, of 1 in 4 .63 and of 3 in 8 .65 (below .75)."""
    for outcomes, below in (([1], False), ([0], True), ([1, 0, 0, 0], True), ([1, 1, 0, 0], False)):
        fallback = Fallback(BACK)
        fallback.add(attempts([1, 1, 0, 1, 1, 1, 0, 1]))
        fallback.moved = True
        fallback.add(attempts(outcomes))
        assert fallback.below == below, outcomes


def test_a_few_failures_are_no_news():
    fallback = Fallback(replace(BACK, least=4))
    fallback.add(attempts([1] * 8))
    fallback.moved = True
    fallback.add(attempts([0] * 3))
    assert not fallback.below
    fallback.add(attempts([0]))
    assert fallback.below


def guarded(**changes) -> ResidualTD3:
    """Eight successes and four failures of the base, then an actor that is free to move."""
    td3 = build(fallback=replace(BACK, **changes), critic_warmup=0, policy_delay=1, learning_starts=1, lr=0.1)
    td3.update(ended([1, 1, 0] * 4))
    assert td3.guard.free and td3.guard.fallback.moved
    return td3


def test_after_a_fall_the_base_acts_and_the_actor_waits():
    td3 = guarded()
    assert float((td3.policy.w.detach() - 0.5).abs().max()) > 0.05
    info = td3.update(ended([0] * 6))
    assert td3.policy.w.tolist() == [0.5, 0.5] and td3.target_parameters["w"].tolist() == [0.5, 0.5]
    assert info["policy/returned"] == 1 and info["policy/free"] == 0 and not td3.optimizer.state
    info = td3.update(ended([1, 0, 1, 1]))
    assert info["policy/returned"] == 0 and td3.policy.w.tolist() == [0.5, 0.5], "it waits for 6 episodes"
    assert td3.guard.fallback.base == [11, 16], "and they are the base's"
    td3.update(ended([1, 1]))
    assert td3.policy.w.tolist() != [0.5, 0.5]


def test_it_returns_to_good_weights_and_next_time_to_the_base():
    """Weights are on trial from the rollout at whose sight they were copied until eight episodes have followed."""
    td3 = guarded()
    on_trial = td3.policy.w.tolist()
    td3.guard.kept["trial"] = replace(td3.guard.kept["trial"], weights={"w": td3.policy.w.detach().clone()})
    td3.update(ended([1] * 8))
    assert td3.policy.w.tolist() != on_trial
    td3.update(ended([0] * 8))
    assert td3.policy.w.tolist() == on_trial and td3.guard.fallback.moved
    td3.update(ended([1] * 6)), td3.update(ended([0] * 8))
    assert td3.policy.w.tolist() == [0.5, 0.5] and not td3.guard.fallback.moved


def test_without_restoring_only_the_blend_goes_back():
    td3 = guarded(restore=False)
    td3.update(ended([1] * 6))
    assert td3.guard.released == 6
    moving = td3.policy.w.tolist()
    info = td3.update(ended([0] * 8))
    assert info["policy/returned"] == 1 and td3.guard.released == 0 and info["policy/free"] == 1
    assert td3.policy.w.tolist() not in (moving, [0.5, 0.5])
    info = td3.update(ended([0] * 8))
    assert info["policy/returned"] == 0, "there is nothing left to return from"


def test_the_blend_grows_only_with_an_actor_level_with_the_base():
    """Base 8 of 12.  Three of the actor's episodes are too few to say, 4 of 6 are as many, 5 of 8 are fewer."""
    td3, released = guarded(least=4), []
    for outcomes in ([1, 1, 1], [1, 0, 0], [0, 1]):
        td3.update(ended(outcomes))
        released.append(td3.guard.released)
    assert released == [0, 3, 3]
    td3.update(ended([1] * 9, [0] * 9))
    assert td3.guard.released == 3 and td3.guard.fallback.base == [17, 21]


def test_a_margin_is_what_noise_may_cost():
    """Base 6 of 8; 5 of 8 are as good for a margin of an eighth, for the growing blend and for weights on trial."""
    for margin, good in ((0.0, False), (0.12, False), (0.125, True)):
        fallback = Fallback(replace(BACK, margin=margin))
        fallback.add(attempts([1, 1, 0, 1, 1, 1, 0, 1]))
        fallback.moved = True
        fallback.add(attempts([1, 1, 1, 0, 0, 1, 1, 0]))
        assert (fallback.level, fallback.passed) == (good, good)
    for margin, below in ((0.0, True), (0.09, True), (0.11, False)):  # Wilson's upper end of 3 in 8 is .65
        fallback = Fallback(replace(BACK, margin=margin))
        fallback.add(attempts([1, 1, 0, 1, 1, 1, 0, 1]))
        fallback.moved = True
        fallback.add(attempts([1, 0, 0, 0, 1, 0, 1, 0]))
        assert fallback.below == below, margin


def test_without_remedies_every_moving_decision_counts():
    td3 = build(critic_warmup=0, policy_delay=1, learning_starts=8)
    info = [td3.update(ended([0] * 6)) for _ in range(3)]
    assert td3.guard.released == 6 and "policy/free" not in info[-1]


# -- state ------------------------------------------------------------------------------------------------------------


def whole(seed: int) -> tuple[RolloutSource, ResidualTD3]:
    torch.manual_seed(seed)
    blend = BlendConfig(decisions=40, start=0.5, per="episode", size=0.2, delay=0.1)
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), replace(SMALL, blend=blend))
    critic = QEnsemble(policy.feature_sizes, 2, 3, HeadConfig(16, 1))
    config = ResidualTD3Config(
        batch=16,
        utd_ratio=0.2,
        learning_starts=30,
        critic_warmup=2,
        lr=1e-2,
        release=ReleaseConfig(0.0, 0.0, 12, 1, 1),
        fallback=FallbackConfig(2, 6, 2, 4),
    )
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(1000, 0.9, 2), config, seeded(seed))
    return RolloutSource(make("point_mass", num_envs=6), policy, 11, SeedStream(50 * seed, 10**9), seeded(seed)), td3


def test_a_resumed_run_is_bit_identical_with_all_remedies(tmp_path):
    """Running episodes, ranked ones, what is kept of the actor, counters, and the blend's share."""
    source, td3 = whole(1)
    for _ in range(4):
        td3.update(source.next())
    guard = td3.guard
    guard.fallback.base, guard.fallback.moved, guard.moved, guard.released = [1, 3], True, True, 17
    guard.kept["good"] = replace(guard.kept["base"], released=9)
    guard.fallback.latest.extend([True, False, True])
    save_state(tmp_path, 1, td3.state_dict())
    _, resumed = whole(2)
    resumed.load_state_dict(latest_state(tmp_path)[1])
    assert resumed.guard.state_dict()["counters"] == guard.state_dict()["counters"]
    for turn in range(5):
        found = source.next()
        success = (torch.arange(66).view(11, 6) % 3 == turn % 3) & (found.terminated | found.truncated)
        found = replace(found, success=success)
        assert td3.update(found) == resumed.update(found)
    one, two = td3.state_dict(), resumed.state_dict()
    save_state(tmp_path / "one", 1, one), save_state(tmp_path / "two", 1, two)
    for name in ("state.json", "tensors.safetensors"):
        found, expected = ((tmp_path / folder / "00000001" / name).read_bytes() for folder in ("one", "two"))
        assert found == expected, name
    assert guard.fallback.base[1] > 3 and len(guard.release.recent) == 12


# -- do the critics foresee outcomes? ---------------------------------------------------------------------------------


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
