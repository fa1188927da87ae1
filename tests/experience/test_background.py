"""Collecting in threads: nothing lost, doubled or reordered; in lockstep with the learner; errors and states kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from vla_rl.experience.background import BackgroundSource, acting_copy

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from tests.auditing import AuditingPolicy
from tests.experience.makers import gaussian
from tests.patience import PATIENCE
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.training.checkpoint import latest_state, save_state

HORIZON, DECISIONS = 4, 6


def counting(sources: int, num_envs: int = 3) -> BackgroundSource:
    policy = AuditingPolicy(HORIZON)
    parts = [
        RolloutSource(
            make("counting", num_envs=num_envs),
            policy,
            DECISIONS,
            SeedStream(300 + i, 2000, sources),
            torch.Generator(),
        )
        for i in range(sources)
    ]
    return BackgroundSource(parts, policy)


def noisy(sources: int = 2) -> BackgroundSource:
    """Gaussian policies in a toy environment, with one set of weights."""
    parts = [gaussian("point_mass", 3, 4, 1, seed=7 + i) for i in range(sources)]
    policy = gaussian("point_mass", 1, 4, 1, seed=7).policy
    for part in parts:
        part.policy = policy
    return BackgroundSource(parts, policy)


def learn(source: BackgroundSource, amount: float = 0.1) -> None:
    """What a learner and its policy store do after a rollout."""
    with torch.no_grad():
        for parameter in source.policy.parameters():
            parameter.add_(amount)
    source.policy.version += 1


def train(source: BackgroundSource, updates: int) -> list[Rollout]:
    rollouts = []
    for _ in range(updates):
        rollouts.append(source.next())
        learn(source)
    return rollouts


def same(one: Rollout, two: Rollout) -> bool:
    def equal(a, b) -> bool:
        if a is None or isinstance(a, str):
            return a == b
        return torch.equal(a, b) if torch.is_tensor(a) else all(equal(a[n], b[n]) for n in [*a, *b])

    return all(
        equal(getattr(one, f.name), getattr(two, f.name)) for f in fields(Rollout) if f.name not in ("info", "spans")
    )


def follows(rollouts: list[Rollout], column: int, seeds) -> None:
    """The decisions of ``column`` count on from one rollout to the next; its episodes come from ``seeds``."""
    length, seed, steps = 0, None, 0
    for rollout in rollouts:
        for t in range(DECISIONS):
            if steps >= length:
                seed, steps = int(rollout.seeds[t, column]), 0
                length = int(episode_length(np.array(seed)))
                assert seed not in seeds
                seeds.append(seed)
            assert rollout.features["counters"][t, column].tolist() == [seed, steps]
            number = steps + np.arange(1, HORIZON + 1)
            wanted = np.where(number <= length, expected_reward(number), 0)
            assert rollout.reward[t, column].tolist() == wanted.tolist()
            steps += HORIZON


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_nothing_is_lost_doubled_or_reordered(sources):
    source = counting(sources)
    rollouts = [source.next() for _ in range(5)]
    source.close()
    assert all(rollout.reward.shape == (DECISIONS, 3 * sources, HORIZON) for rollout in rollouts)
    for i in range(sources):
        seeds: list[int] = []
        for column in range(3 * i, 3 * i + 3):
            follows(rollouts, column, seeds)
        assert sorted(seeds) == list(range(300 + i, 300 + i + sources * len(seeds), sources))
    for rollout in rollouts:
        t, column = rollout.final_index.T
        last = rollout.final_features["counters"]
        assert len(last) == int(rollout.truncated.sum()) and rollout.truncated[t, column].all()
        assert last[:, 0].tolist() == rollout.seeds[t, column].tolist()
        assert last[:, 1].tolist() == episode_length(last[:, 0].numpy()).tolist()
        assert rollout.info["env/steps"] == float(rollout.valid.sum())
        assert rollout.info["rollout/episodes"] == float((rollout.terminated | rollout.truncated).sum())


def test_the_learner_s_waiting_is_its_own_and_collecting_is_beside():
    source = counting(2)
    info = source.next().info
    source.close()
    assert info["time/wait_s"] > 0 and info["collector/env_s"] > 0 and info["collector/act_s"] > 0
    assert info["time/env_s"] == info["time/encode_s"] == info["time/act_s"] == info["collector/wait_s"] == 0


def test_threads_give_what_one_source_gives_when_the_learner_is_waited_for():
    """One source changes nothing, weights published between two rollouts included."""
    plain = gaussian("point_mass", 3, 4, 1, seed=7)
    behind = noisy(sources=1)
    for _ in range(4):
        assert same(plain.next(), behind.next())
        for policy in (plain.policy, behind.policy):
            with torch.no_grad():
                policy.log_std.add_(0.1)
    behind.close()


def test_timing_changes_nothing():
    """A slow learner, a slow collector: equal rollouts."""
    usual = noisy()
    expected = train(usual, 4)
    usual.close()
    late, gate = noisy(), threading.Event()
    collect = late.sources[1].next

    def slow() -> Rollout:
        gate.wait(PATIENCE)
        return collect()

    late.sources[1].next = slow
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    found = train(late, 4)
    timer.join()
    late.close()
    assert all(same(one, two) for one, two in zip(found, expected, strict=True))


def noted(call, threads: set[str], *arguments):
    threads.add(threading.current_thread().name)
    return call(*arguments)


def test_each_source_works_in_one_thread_of_its_own():
    source, used = noisy(), [set(), set()]
    for i, part in enumerate(source.sources):
        for owner, name in ((part, "next"), (part, "state_dict"), (part, "load_state_dict"), (part.env, "close")):
            setattr(owner, name, partial(noted, getattr(owner, name), used[i]))
    train(source, 3)
    source.load_state_dict(source.state_dict())
    source.next()
    source.close()
    source.close()
    assert used == [{"collector-0_0"}, {"collector-1_0"}]
    with pytest.raises(UserError, match="closed"):
        source.next()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("collector") and thread.is_alive()]


def test_a_saved_run_continues_with_the_same_rollouts(tmp_path):
    source = noisy()
    train(source, 3)
    save_state(tmp_path, 3, {"source": source.state_dict(), "policy": source.policy.state_dict()})
    expected = train(source, 3)
    source.close()
    resumed = noisy()
    _, state = latest_state(tmp_path)
    resumed.policy.load_state_dict(state["policy"])
    resumed.policy.version = 3
    resumed.load_state_dict(state["source"])
    found = train(resumed, 3)
    resumed.close()
    assert all(same(one, two) for one, two in zip(found, expected, strict=True))


def test_a_state_of_another_number_of_threads_is_refused():
    one, two = noisy(sources=1), noisy(sources=2)
    with pytest.raises(UserError, match="1 collectors and there are 2 now"):
        two.load_state_dict(one.state_dict())
    for source in (one, two):
        source.close()


def test_an_error_of_a_source_is_raised_in_the_learner_and_nothing_is_lost():
    """What the other source has collected is kept, in a saved state too."""
    source, expected = noisy(), noisy()
    assert same(train(source, 1)[0], train(expected, 1)[0])
    source._pending[1] = source._threads[1].submit(_fail)
    with pytest.raises(NonFiniteError, match="chose a non-finite action"):
        source.next()
    state, resumed = source.state_dict(), noisy()
    assert [pending is None for pending in state["pending"]] == [False, True]
    learn(resumed)
    resumed.load_state_dict(state)
    wanted = expected.next()
    assert same(source.next(), wanted) and same(resumed.next(), wanted)
    for one in (source, expected, resumed):
        one.close()


def _fail() -> Rollout:
    raise NonFiniteError("the policy chose a non-finite action.")


def test_nan_weights_are_reported_by_the_next_call_and_repaired_ones_continue():
    source = noisy(sources=1)
    source.next()
    healthy = {name: item.clone() for name, item in source.policy.state_dict().items()}
    learn(source, float("nan"))
    with pytest.raises(NonFiniteError):
        source.next()
    source.policy.load_state_dict(healthy)
    assert torch.isfinite(source.next().sample).all()
    source.close()


def test_parameters_that_never_change_are_shared_with_the_copies():
    policy = gaussian("point_mass", 1, 1, 1, seed=0).policy
    frozen = torch.nn.Linear(2, 2)
    policy.register_module("frozen", frozen)
    moving = {name: item for name, item in policy.named_parameters() if not name.startswith("frozen.")}
    policy.trainable = lambda: moving
    copied = acting_copy(policy)
    assert copied.frozen.weight is frozen.weight and copied.log_std is not policy.log_std
    assert torch.equal(copied.log_std, policy.log_std) and copied.version == policy.version


def test_without_a_source_it_says_so():
    with pytest.raises(UserError, match="there is no source"):
        BackgroundSource([], AuditingPolicy(1))


INTERRUPTED = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C, and so do their children
from tests.experience.test_background import noisy
source = noisy()
source.next()
started, collect = threading.Event(), source.sources[0].next
def slow():
    started.set()
    threading.Event().wait(0.5)
    return collect()
source.sources[0].next = slow
threading.Timer(0.2, lambda: started.wait() and print("collecting", flush=True)).start()
while True:
    source.next()
"""


def test_ctrl_c_ends_the_process_after_the_rollout_that_is_being_collected():
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"collecting\n"
    time.sleep(0.2)  # Until it waits: an interrupt while Python's `wait` takes its locks may leave them taken for ever.
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and b"KeyboardInterrupt" in errors
