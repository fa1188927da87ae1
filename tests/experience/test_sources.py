"""Sources side by side: nothing lost, doubled or reordered, in step with the learner (0) and ahead of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.toy.counting import episode_length, expected_reward
from tests.auditing import AuditingPolicy
from tests.experience.makers import LuckyEnv, counting, gaussian
from tests.experience.makers import equal_rollouts as same
from tests.experience.test_groups import SMALL, START, audit, seeds_of
from tests.patience import PATIENCE, wait_until
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.rollout import SeedStream
from vla_rl.experience.sources import Collectors, acting_copy
from vla_rl.experience.worker import Worker
from vla_rl.training.checkpoint import latest_state, save_state

HORIZON, DECISIONS, ENVS = 4, 6, 3
ROOT = str(Path(__file__).resolve().parents[2])


def threads(sources: int, staleness: int, windows: int | None = None) -> Collectors:
    return Collectors([counting(i, sources) for i in range(sources)], AuditingPolicy(HORIZON), staleness, windows)


def processes(sources: int, staleness: int, workers: list[Worker]) -> Collectors:
    """As ``threads``, each source in a process of its own, of which a dead one is replaced."""

    def made(i: int) -> ProcessSource:
        workers[i].close()
        workers[i] = Worker()
        return ProcessSource("tests.experience.makers:counting", {"part": i, "parts": sources}, workers[i])

    workers += [Worker() for _ in range(sources)]
    return Collectors([made(i) for i in range(sources)], AuditingPolicy(HORIZON), staleness, remake=made)


def noisy(sources: int = 2) -> Collectors:
    """Gaussian policies in a toy environment, with one set of weights, in step."""
    parts = [gaussian("point_mass", 3, 4, 1, seed=7 + i) for i in range(sources)]
    return Collectors(parts, gaussian("point_mass", 1, 4, 1, seed=7).policy)


def train(source: Collectors, updates: int, pause=lambda: None) -> list[Rollout]:
    """Rollouts, each of which was learnt from at the version of its number, and so were made by it or an older one."""
    rollouts = []
    for _ in range(updates):
        rollout = source.next()
        assert (rollout.version <= source.policy.version).all()
        pause()
        if isinstance(source.policy, torch.nn.Module):
            with torch.no_grad():
                source.policy.log_std.add_(0.1)
        source.policy.version += 1
        rollouts.append(rollout)
    return rollouts


def require_whole(rollouts: list[Rollout], sources: int) -> None:
    """Every source's windows, in the order of delivery, count on without a gap, from the first seed on."""
    windows = [
        (rollout, slice(first, first + ENVS))
        for rollout in rollouts
        for first in range(0, rollout.reward.shape[1], ENVS)
    ]
    for part in range(sources):
        own = [window for window in windows if int(window[0].seeds[0, window[1].start]) % sources == part]
        seeds: list[int] = []
        for env in range(ENVS):
            seed, steps, length = -1, 0, 0
            for rollout, columns in own:
                column = columns.start + env
                for t in range(DECISIONS):
                    if steps >= length:
                        seed, steps = int(rollout.seeds[t, column]), 0
                        length = int(episode_length(np.array(seed)))
                        seeds.append(seed)
                    assert rollout.features["counters"][t, column].tolist() == [seed, steps]
                    number = steps + np.arange(1, HORIZON + 1)
                    wanted = np.where(number <= length, expected_reward(number), 0)
                    assert rollout.reward[t, column].tolist() == wanted.tolist()
                    steps += HORIZON
        assert len(seeds) == len(set(seeds)) and {seed % sources for seed in seeds} <= {part}
        begun = 300 + (part - 300) % sources
        missing = set(range(begun, max(seeds, default=begun), sources)) - set(seeds)
        assert not missing


def uneven(source: Collectors, seed: int) -> None:
    """Every decision takes another time, some a hundred times as long."""
    generator = random.Random(seed)
    for player in source._players:
        advance = player.source.advance

        def slow(advance=advance) -> bool:
            time.sleep(generator.choice([0.0, 0.0, 0.0001, 0.01]))
            return advance()

        player.source.advance = slow


def wait_for_windows(source: Collectors, count: int) -> None:
    """Return when so many finished windows wait."""
    wait_until(lambda: len(source.state_dict()["windows"]) >= count)


@pytest.mark.parametrize(("sources", "staleness"), [(1, 0), (3, 0), (1, 1), (4, 1), (2, 2), (4, 8)])
def test_nothing_is_lost_doubled_or_reordered(sources, staleness):
    source = threads(sources, staleness)
    uneven(source, staleness)
    rollouts = train(source, 8, lambda: time.sleep(random.Random(1).choice([0.0, 0.02])))
    source.close()
    require_whole(rollouts, sources)
    for rollout in rollouts:
        assert rollout.reward.shape == (DECISIONS, ENVS * sources, HORIZON)
        t, column = rollout.final_index.T
        last = rollout.final_features["counters"]
        assert len(last) == int(rollout.truncated.sum()) and rollout.truncated[t, column].all()
        assert last[:, 0].tolist() == rollout.seeds[t, column].tolist()
        assert last[:, 1].tolist() == episode_length(last[:, 0].numpy()).tolist()
        assert rollout.info["env/steps"] == float(rollout.valid.sum())
        assert rollout.info["rollout/episodes"] == float((rollout.terminated | rollout.truncated).sum())


# -- in step -----------------------------------------------------------------------------------------------------------


def test_the_learners_waiting_is_its_own_and_collecting_beside():
    source = threads(2, 0)
    info = source.next().info
    source.close()
    assert info["time/wait_s"] > 0 and info["collector/env_s"] > 0 and info["collector/act_s"] > 0
    assert info["time/env_s"] == info["time/encode_s"] == info["time/act_s"] == info["collector/wait_s"] == 0


def test_one_source_in_step_changes_nothing():
    """Weights published between two rollouts included."""
    plain, beside = gaussian("point_mass", 3, 4, 1, seed=7), noisy(sources=1)
    for _ in range(4):
        one, two = plain.next(), beside.next()
        assert torch.equal(one.sample, two.sample) and torch.equal(one.logprob, two.logprob)
        for policy in (plain.policy, beside.policy):
            with torch.no_grad():
                policy.log_std.add_(0.1)
    beside.close()


def test_in_step_timing_changes_nothing():
    usual, late, gate = noisy(), noisy(), threading.Event()
    slow = late._players[1].source
    slow.next = lambda collect=slow.next: gate.wait(PATIENCE) and collect()
    threading.Timer(0.2, gate.set).start()
    assert all(map(same, train(late, 4), train(usual, 4)))
    usual.close()
    late.close()


def test_a_run_in_step_goes_on_bit_for_bit(tmp_path):
    source, resumed = noisy(), noisy()
    train(source, 3)
    save_state(tmp_path, 3, {"source": source.state_dict(), "policy": source.policy.state_dict()})
    _, state = latest_state(tmp_path)
    resumed.policy.load_state_dict(state["policy"])
    resumed.policy.version = 3
    resumed.load_state_dict(state["source"])
    assert str(resumed.state_dict()["sources"][0].keys()) == str(state["source"]["sources"][0].keys())
    assert all(map(same, train(resumed, 3), train(source, 3)))
    source.close()
    resumed.close()


def test_an_error_in_step_keeps_what_the_others_collected():
    """In a saved state too."""
    source, expected, resumed = noisy(), noisy(), noisy()
    assert same(train(source, 1)[0], train(expected, 1)[0])
    broken = source._players[1].source
    collect, broken.next = broken.next, _fail
    with pytest.raises(NonFiniteError, match="chose a non-finite action"):
        source.next()
    broken.next = collect
    state = source.state_dict()
    assert [window["player"] for window in state["windows"]] == [0]
    resumed.policy.load_state_dict(source.policy.state_dict())
    resumed.policy.version = source.policy.version
    resumed.load_state_dict(state)
    wanted = expected.next()
    assert same(source.next(), wanted) and same(resumed.next(), wanted)
    for one in (source, expected, resumed):
        one.close()


def _fail() -> Rollout:
    raise NonFiniteError("the policy chose a non-finite action.")


def test_parameters_that_never_change_are_shared_with_copies():
    policy = gaussian("point_mass", 1, 1, 1, seed=0).policy
    frozen = torch.nn.Linear(2, 2)
    policy.register_module("frozen", frozen)
    moving = {name: item for name, item in policy.named_parameters() if not name.startswith("frozen.")}
    policy.trainable = lambda: moving
    copied = acting_copy(policy)
    assert copied.frozen.weight is frozen.weight and copied.log_std is not policy.log_std
    assert torch.equal(copied.log_std, policy.log_std) and copied.version == policy.version


INTERRUPTED = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore Ctrl-C, and so do their children
from tests.experience.test_sources import noisy
source = noisy()
source.next()
slowed = source._players[0].source
started, collect = threading.Event(), slowed.next
def slow():
    started.set()
    threading.Event().wait(0.5)
    return collect()
slowed.next = slow
threading.Timer(0.2, lambda: started.wait() and print("collecting", flush=True)).start()
while True:
    source.next()
"""


@pytest.mark.full
def test_ctrl_c_ends_the_process_after_the_present_rollout():
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"collecting\n"
    time.sleep(0.2)  # Until it waits: an interrupt while Python's `wait` takes its locks may leave them taken for ever.
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and b"KeyboardInterrupt" in errors


# -- in step and ahead -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
def test_each_source_is_used_and_closed_in_its_own_thread(staleness):
    source, used = threads(2, staleness), [set(), set()]

    def noted(call, i, *arguments):
        used[i].add(threading.current_thread().name)
        return call(*arguments)

    for i, player in enumerate(source._players):
        for owner, name in ((player.source, "advance"), (player.source, "state_dict"), (player.source.env, "close")):
            setattr(owner, name, partial(noted, getattr(owner, name), i))
    train(source, 3)
    source.state_dict()
    source.close()
    source.close()
    assert used == [{"collector-0_0"}, {"collector-1_0"}]
    with pytest.raises(UserError, match="closed"):
        source.next()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("collector")]


@pytest.mark.parametrize("staleness", [0, 1])
def test_nan_weights_are_an_error_and_repaired_ones_go_on(staleness):
    part, policy = gaussian("point_mass", 3, 4, 1, seed=7), gaussian("point_mass", 1, 4, 1, seed=7).policy
    source = Collectors([part], policy, staleness)
    source.next()
    healthy = {name: item.clone() for name, item in source.policy.state_dict().items()}
    with torch.no_grad():
        source.policy.log_std.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="non-finite action"):
        [source.next() for _ in range(3)]  # those that were played before are delivered first
    source.policy.load_state_dict(healthy)
    assert torch.isfinite(source.next().sample).all()
    source.close()


@pytest.mark.parametrize(
    ("sources", "staleness", "windows", "sentence"),
    [
        (0, 1, None, "there is no source, so nothing is collected"),
        (4, 1, 1, "lets 2 windows be under way, so 2 of 4 sources would never play; set staleness to 3 or more"),
    ],
)
def test_sources_that_would_never_play_are_refused(sources, staleness, windows, sentence):
    with pytest.raises(UserError, match=sentence):
        threads(sources, staleness, windows)


# -- ahead -------------------------------------------------------------------------------------------------------------


def test_groups_stay_whole_and_may_span_versions():
    parts = [
        SMALL.build(LuckyEnv(7), AuditingPolicy(HORIZON), SeedStream(START + i, 10**6, 2), torch.Generator())
        for i in range(2)
    ]
    source = Collectors(parts, AuditingPolicy(HORIZON), 2)
    uneven(source, 1)
    rollouts = train(source, 8)
    source.close()
    for rollout in rollouts:
        audit(rollout, HORIZON, SMALL.size)
    delivered = [seed for rollout in rollouts for seed in seeds_of(rollout)]
    assert len(delivered) == len(set(delivered)) == 8 * 2 * SMALL.groups
    spans = [len(group.unique()) for rollout in rollouts for group in rollout.version.split(SMALL.size, dim=1)]
    assert max(spans) > 1


def test_windows_one_by_one_are_streams_of_their_own():
    source = threads(3, 2, windows=1)
    rollouts = train(source, 15)
    source.close()
    require_whole(rollouts, 3)
    named = {(rollout.stream, int(rollout.seeds[0, 0]) % 3) for rollout in rollouts}
    assert named <= {(f"source-{i}", i) for i in range(3)} and len(named) > 1


def test_a_window_goes_on_over_a_change_of_weights():
    source, held, gate, calls = threads(1, 1), threading.Event(), threading.Event(), []
    player = source._players[0].source
    advance = player.advance

    def gated() -> bool:
        calls.append(1)
        if len(calls) == DECISIONS + 3:  # in the middle of the second window
            held.set()
            gate.wait(PATIENCE)
        return advance()

    player.advance = gated
    train(source, 1)
    assert held.wait(PATIENCE)
    threading.Timer(0.05, gate.set).start()  # once the learner asks, with the weights of version 1
    rollout = source.next()
    source.close()
    assert rollout.version[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_the_bound_is_on_what_is_begun():
    source = threads(2, 3)
    source.next()
    wait_for_windows(source, 6)
    time.sleep(0.05)
    assert source._begun == 2 * (1 + 3) and len(source.state_dict()["windows"]) == 6
    source.close()


def test_a_slow_source_holds_nobody_up_and_is_learnt_from_next():
    source, gate = threads(2, 2), threading.Event()
    slow = source._players[0].source
    advance = slow.advance

    def held() -> bool:
        gate.wait(PATIENCE)
        return advance()

    slow.advance = held
    rollouts = train(source, 5)  # of the other source alone
    assert all((rollout.seeds % 2 == 1).all() for rollout in rollouts)
    wait_for_windows(source, 3)  # all that may be begun, but for the held one
    gate.set()
    wait_for_windows(source, 4)
    rollouts += train(source, 1)
    assert (rollouts[-1].seeds[:, :ENVS] % 2 == 0).all() and (rollouts[-1].version[0, :ENVS] == 0).all()
    rollouts += train(source, 4)
    source.close()
    require_whole(rollouts, 2)


def test_a_run_ahead_is_saved_without_waiting_and_goes_on(tmp_path):
    """Finished windows are in the state and count as begun; running ones are played again, from the same seeds."""
    source, gate = threads(2, 2), threading.Event()
    rollouts = train(source, 3)
    stuck = source._players[1].source
    advance = stuck.advance
    stuck.advance = lambda: gate.wait(PATIENCE) and advance()
    wait_for_windows(source, 1)
    save_state(tmp_path, 3, source.state_dict())  # although a window is running and will not end
    gate.set()
    source.close()
    resumed = threads(2, 2)
    resumed.policy.version = 3
    resumed.load_state_dict(latest_state(tmp_path)[1])
    rollouts += train(resumed, 6)
    wait_for_windows(resumed, 4)
    time.sleep(0.05)
    assert len(resumed.state_dict()["windows"]) == 4
    resumed.close()
    require_whole(rollouts, 2)


def kill_while_training(kills: int, sources: int, staleness: int) -> int:
    """Train, and kill a random worker at random moments; returns how many sources were made anew."""
    workers: list[Worker] = []
    source, generator, done = processes(sources, staleness, workers), random.Random(kills), threading.Event()
    killed: list[int] = []

    def killer() -> None:
        while len(killed) < kills and not done.wait(generator.uniform(0.0, 0.5)):
            playing = [workers[i].pid for i, player in enumerate(source._players) if player.placed]
            fresh = [pid for pid in playing if pid not in killed]
            if fresh:
                killed.append(generator.choice(fresh))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=killer, daemon=True)
    thread.start()
    rollouts: list[Rollout] = []
    while thread.is_alive() or len(rollouts) < 10:
        rollouts += train(source, 1)
    thread.join()
    rollouts += train(source, 3)
    while not rollouts[-1].info.get("source/restarts", 0):  # who died with its window sent is missed at its next one
        rollouts += train(source, 1)
    source.close()
    for worker in workers:
        worker.close()
    require_whole(rollouts, sources)
    assert len(killed) == kills
    return int(rollouts[-1].info.get("source/restarts", 0))


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_two_hundred_kills_lose_nothing(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr("vla_rl.experience.sources.ATTEMPTS", 200)  # a busy machine finishes no window between kills
    assert kill_while_training(kills=200, sources=3, staleness=2) >= 100


@pytest.mark.full
def test_a_process_that_always_dies_ends_the_run(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr("vla_rl.experience.sources.ATTEMPTS", 2)
    workers: list[Worker] = []
    source = processes(1, 1, workers)
    made = source._players[0]._remake
    os.kill(workers[0].pid, signal.SIGKILL)

    def stillborn() -> ProcessSource:
        found = made()
        os.kill(workers[0].pid, signal.SIGKILL)
        return found

    source._players[0]._remake = stillborn
    with pytest.raises(UserError, match="was killed by SIGKILL"):
        source.next()
    source.close()
