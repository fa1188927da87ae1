"""Sources ahead of the learner: nothing lost, doubled or reordered, no waiting for the slowest."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from vla_rl.experience.asynchronous import AsyncSource

from sims.toy.counting import episode_length, expected_reward
from tests.auditing import AuditingPolicy
from tests.experience.makers import counting, gaussian
from tests.experience.test_groups import SMALL, START, LuckyEnv, audit, seeds_of
from tests.patience import PATIENCE
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.rollout import SeedStream
from vla_rl.experience.worker import Worker
from vla_rl.training.checkpoint import latest_state, save_state

HORIZON, DECISIONS, ENVS = 4, 6, 3
ROOT = str(Path(__file__).resolve().parents[2])


def threads(sources: int, staleness: int, windows: int | None = None) -> AsyncSource:
    return AsyncSource([counting(i, sources) for i in range(sources)], AuditingPolicy(HORIZON), staleness, windows)


def processes(sources: int, staleness: int, workers: list[Worker]) -> AsyncSource:
    """As ``threads``, each source in a process of its own, of which a dead one is replaced."""

    def made(i: int) -> ProcessSource:
        workers[i].close()
        workers[i] = Worker()
        return ProcessSource("tests.experience.makers:counting", {"part": i, "parts": sources}, workers[i])

    workers += [Worker() for _ in range(sources)]
    return AsyncSource([made(i) for i in range(sources)], AuditingPolicy(HORIZON), staleness, remake=made)


def learn(source: AsyncSource) -> None:
    source.policy.version += 1


def train(source: AsyncSource, updates: int, pause=lambda: None) -> list[Rollout]:
    """Rollouts, each of which was learnt from at the version of its number, and so were made by it or an older one."""
    rollouts = []
    for _ in range(updates):
        rollout = source.next()
        assert (rollout.version <= source.policy.version).all()
        pause()
        learn(source)
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


def uneven(source: AsyncSource, seed: int) -> None:
    """Every decision takes another time, some a hundred times as long."""
    generator = random.Random(seed)
    for player in source._players:
        advance = player.source.advance

        def slow(advance=advance) -> bool:
            time.sleep(generator.choice([0.0, 0.0, 0.0001, 0.01]))
            return advance()

        player.source.advance = slow


def wait_for_windows(source: AsyncSource, count: int) -> None:
    """Return when so many finished windows wait."""
    deadline = time.monotonic() + PATIENCE
    while len(source.state_dict()["windows"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("staleness", [1, 2, 8])
@pytest.mark.parametrize("sources", [1, 2, 4])
def test_nothing_is_lost_doubled_or_reordered(sources, staleness):
    source = threads(sources, staleness)
    uneven(source, staleness)
    rollouts = train(source, 12, lambda: time.sleep(random.Random(1).choice([0.0, 0.02])))
    source.close()
    require_whole(rollouts, sources)
    assert all(rollout.reward.shape == (DECISIONS, ENVS * sources, HORIZON) for rollout in rollouts)
    assert all(rollout.info["env/steps"] == float(rollout.valid.sum()) for rollout in rollouts)


def test_groups_stay_whole_and_may_span_versions():
    parts = [
        SMALL.build(LuckyEnv(7), AuditingPolicy(HORIZON), SeedStream(START + i, 10**6, 2), torch.Generator())
        for i in range(2)
    ]
    source = AsyncSource(parts, AuditingPolicy(HORIZON), 2)
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


def test_a_slow_source_holds_nobody_up_and_its_window_is_the_next_one_that_is_learnt_from():
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


def test_a_saved_run_goes_on_where_it_was_without_waiting(tmp_path):
    """Finished windows are in the state; running ones are played again, from the same seeds."""
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
    resumed.close()
    require_whole(rollouts, 2)


def test_a_state_of_another_number_of_sources_is_refused():
    one, two = threads(1, 1), threads(2, 1)
    with pytest.raises(UserError, match="1 sources and there are 2 now"):
        two.load_state_dict(one.state_dict())
    one.close()
    two.close()


def test_an_error_of_a_source_is_raised_by_next_and_repaired_weights_go_on():
    part = gaussian("point_mass", 3, 4, 1, seed=7)
    source = AsyncSource([part], gaussian("point_mass", 1, 4, 1, seed=7).policy, 1)
    source.next()
    healthy = {name: item.clone() for name, item in source.policy.state_dict().items()}
    with torch.no_grad():
        source.policy.log_std.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="non-finite action"):
        [source.next() for _ in range(3)]  # those that were played before are delivered first
    source.policy.load_state_dict(healthy)
    assert torch.isfinite(source.next().sample).all()
    source.close()


def test_each_source_is_used_and_closed_in_its_own_thread():
    source, used = threads(2, 1), [set(), set()]

    def noted(call, i, *arguments):
        used[i].add(threading.current_thread().name)
        return call(*arguments)

    for i, player in enumerate(source._players):
        for owner, name in ((player.source, "advance"), (player.source, "state_dict"), (player.source.env, "close")):
            setattr(owner, name, partial(noted, getattr(owner, name), i))
    train(source, 3)
    source.close()
    source.close()
    assert used == [{"source-0"}, {"source-1"}]
    with pytest.raises(UserError, match="closed"):
        source.next()


@pytest.mark.parametrize(
    ("sources", "staleness", "windows", "sentence"),
    [
        (0, 1, None, "0 sources with a staleness of 1 are never ahead"),
        (2, 0, None, "2 sources with a staleness of 0 are never ahead"),
        (4, 1, 1, "lets 2 windows be under way, so 2 of 4 sources would never play; set staleness to 3 or more"),
    ],
)
def test_a_staleness_that_starves_is_refused(sources, staleness, windows, sentence):
    with pytest.raises(UserError, match=sentence):
        AsyncSource([counting(i, sources) for i in range(sources)], AuditingPolicy(1), staleness, windows)


def kill_while_training(kills: int, sources: int, staleness: int) -> int:
    """Train, and kill a random worker at random moments; returns how many sources were made anew."""
    workers: list[Worker] = []
    source, generator, done = processes(sources, staleness, workers), random.Random(kills), threading.Event()
    killed: list[int] = []

    def killer() -> None:
        while len(killed) < kills and not done.wait(generator.uniform(0.0, 0.5)):
            playing = [workers[i].pid for i, player in enumerate(source._players) if player._placed]
            fresh = [pid for pid in playing if pid not in killed]
            if fresh:
                killed.append(generator.choice(fresh))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=killer)
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
def test_a_source_whose_process_is_killed_plays_its_window_again(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    assert kill_while_training(kills=1, sources=2, staleness=2) == 1


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_two_hundred_kills_lose_nothing(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    assert kill_while_training(kills=200, sources=3, staleness=2) >= 100


@pytest.mark.full
def test_a_process_that_always_dies_ends_the_run(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setattr("vla_rl.experience.asynchronous.ATTEMPTS", 2)
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


def test_a_resumed_source_is_no_further_ahead_than_before(tmp_path):
    """Finished windows that were saved count as begun."""
    source = threads(2, 1)
    train(source, 1)
    wait_for_windows(source, 2)
    save_state(tmp_path, 1, source.state_dict())
    source.close()
    resumed = threads(2, 1)
    found = latest_state(tmp_path)
    assert found is not None
    resumed.load_state_dict(found[1])
    resumed.next()
    wait_for_windows(resumed, 2)
    for _ in range(50):
        time.sleep(0.01)
        assert len(resumed.state_dict()["windows"]) == 2
    resumed.close()
