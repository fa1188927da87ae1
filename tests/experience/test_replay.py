"""The replay buffer: nothing lost, doubled or reordered, n-step returns by brute force, eviction, streams, state."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.auditing import AuditingPolicy
from tests.experience.makers import LuckyEnv
from tests.experience.replays import (
    GAMMA,
    NUM_ENVS,
    ROOMY,
    START,
    audit,
    chunk,
    decided,
    ended,
    filled,
    length_of,
    line,
    of_ended_episodes,
    same,
    source,
)
from tests.held import Killed
from tests.toys import seeded
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.replay import InMemory, Interventions, OnDisk, Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.training.checkpoint import latest_state, save_state

CASES = [(1, 24, 1), (4, 9, 3), (8, 7, 5)]  # horizon, decisions, n_step


@pytest.mark.parametrize(("horizon", "decisions", "n_step"), CASES)
def test_every_slot_can_be_recomputed_and_none_is_missing(horizon, decisions, n_step):
    replay, maker, episodes, added = Replay(ROOMY, GAMMA, n_step), source(horizon, decisions), [], 0
    for _ in range(4):
        window = maker.next()
        assert replay.add(window) == decisions * NUM_ENVS
        added += decisions * NUM_ENVS
        assert len(replay) == added
        episodes += ended(window)
    running = running_slots(maker, horizon)
    slots = [(seed, at) for seed, _ in episodes for at in [*range(0, length_of(seed), horizon), None]] + running
    assert len(episodes) > 15 and len({seed for seed, _ in episodes}) == len(episodes)
    columns = {name: item[: len(slots)].tolist() for name, item in replay.columns.items()}
    assert not replay.columns["remaining"][len(slots) :].any()
    for i, (seed, at) in enumerate(slots):
        assert columns["seed"][i] == (seed if at is not None else 0)
        if at is not None:
            reward, number = chunk(seed, at, horizon)
            assert columns["reward"][i] == pytest.approx(reward, rel=1e-6) and columns["count"][i] == number
            assert columns["terminated"][i] == (at + number == length_of(seed) and seed % 2 == 0)
            assert columns["features/counters"][i] == [seed, at]
        elif seed % 2 and i < len(slots) - len(running):
            assert columns["features/counters"][i] == [seed, length_of(seed)]
    present = replay.decisions()
    assert present.tolist() == [i for i, (_, at) in enumerate(slots) if at is not None]
    audit(replay.transitions(present[present < len(slots) - len(running)]), horizon, n_step)
    audit_running(replay.transitions(present[present >= len(slots) - len(running)]), maker, horizon, n_step)


def running_slots(maker: RolloutSource, horizon: int) -> list[tuple[int, int | None]]:
    """(seed, step) of the slots of running episodes, one environment after the other; None at their ends."""
    found: list[tuple[int, int | None]] = []
    for seed, step in maker.driver.features["counters"].tolist():
        found += [(seed, at) for at in range(0, step, horizon)] + [(seed, None)] * (step > 0)
    return found


def audit_running(found: Transitions, maker: RolloutSource, horizon: int, n_step: int) -> None:
    """The decisions of running episodes bootstrap at the latest observation at most; their returns are unknown."""
    latest = dict(maker.driver.features["counters"].tolist())
    before = found.features["counters"].tolist()
    after = [min(at + n_step * horizon, latest[seed]) for seed, at in before]
    pairs = [(at, stop) for (_, at), stop in zip(before, after, strict=True)]
    rewards = [sum(GAMMA**i * (at + 1 + i) for i in range(stop - at)) for at, stop in pairs]
    np.testing.assert_allclose(found.reward, rewards, rtol=1e-5)
    np.testing.assert_allclose(found.discount, [GAMMA ** (stop - at) for at, stop in pairs], rtol=1e-5)
    assert [stop for _, stop in found.next_features["counters"].tolist()] == after
    assert (found.returns == -np.inf).all()


def test_early_samples_are_not_biased_towards_short_episodes():
    """Episodes of 2 and of 18 decisions: ended episodes alone would hold short ones only at first."""
    replay, kinds = Replay(ROOMY, 1.0), []
    for part in range(3):
        short = [line([1.0, 1.0], 100 * part + 10 * i, seed=9 * part + i, stream="short") for i in range(3)]
        long = line([1.0] * 6, 1000 + 100 * part, seed=7, end="terminated" if part == 2 else "", stream="long")
        for played in [*short, long]:
            assert replay.add(played) == len(played.reward)
        ids = replay.transitions(replay.decisions()).features["id"]
        kinds.append([int((ids < 1000).sum()), int((ids >= 1000).sum())])
    assert kinds == [[6, 6], [12, 12], [18, 18]]
    assert (replay.transitions(replay.decisions()).returns > 0).all()


def test_two_robots_never_mix():
    """Environment 0 of either robot is in mid-episode with the same seed; each continues its own."""
    replay = Replay(40, 1.0, 9)
    for robot, reward in (("left", 1.0), ("right", 10.0)):
        replay.add(line([reward] * 2, seed=3, end="", robot=robot, stream=robot))
    for robot, reward in (("left", 1.0), ("right", 10.0)):
        replay.add(line([reward], 5, seed=3, robot=robot, stream=robot))
    found = replay.transitions(replay.decisions())
    assert found.returns.tolist() == [3.0, 2.0, 1.0, 30.0, 20.0, 10.0]
    assert [replay.robots[i] for i in found.robot] == ["left"] * 3 + ["right"] * 3


def test_a_saved_buffer_knows_its_robots():
    replay, loaded = Replay(20, 1.0), Replay(20, 1.0)
    for i, robot in enumerate(("left", "right")):
        replay.add(line([1.0] * 2, 10 * i, robot=robot, stream=robot))
    loaded.load_state_dict(replay.state_dict())
    loaded.add(line([1.0], 30, robot="right", stream="right"))
    found = loaded.transitions(loaded.decisions())
    assert [loaded.robots[i] for i in found.robot] == ["left", "left", "right", "right", "right"]


def test_every_decision_keeps_its_version_its_task_and_who_acted():
    replay = Replay(20, 1.0)
    acted = torch.tensor([False, True, False])[:, None, None]
    version, task = torch.tensor([4, 5, 5])[:, None], torch.tensor([2, 2, 2])[:, None]
    replay.add(line([1.0] * 3, intervened=acted, version=version, task=task, robot="arm"))
    replay.add(line([1.0] * 2, 10, seed=1, version=torch.tensor([6, 6])[:, None], task=task[:2] - 1, robot="arm"))
    found = replay.transitions(replay.decisions())
    assert found.version.tolist() == [4, 5, 5, 6, 6] and found.task.tolist() == [2, 2, 2, 1, 1]
    assert found.intervened.tolist() == [False, True, False, False, False]
    assert replay.robots == ["arm"] and found.robot.tolist() == [0] * 5
    window = source().next()
    assert window.robot == "counting" and torch.equal(window.task, window.seeds % 2)


@pytest.mark.parametrize("decisions", [1, 4, 36])
def test_windows_cut_anywhere_give_the_same_replay(decisions):
    one, two = filled(Replay(ROOMY, GAMMA)), filled(Replay(ROOMY, GAMMA), decisions=decisions, windows=36 // decisions)
    assert len(one) == len(two) > 50
    assert all(torch.equal(item, two.columns[name]) for name, item in one.columns.items())


def numbered(generator: torch.Generator) -> tuple[Rollout, Rollout]:
    """Two consecutive random rollouts of ragged chunks, ends and idle decisions; "id" numbers the observations."""
    time, num_envs, horizon = (int(torch.randint(low, 7, (), generator=generator)) for low in (3, 1, 1))
    parts = []
    for part in range(2):
        uniform = torch.rand(4, time, num_envs, generator=generator)
        over = uniform[0] < 0.25
        count = 1 + (uniform[1] * horizon).long()
        count[(uniform[2] < 0.15) & ~over] = 0  # idle
        valid = torch.arange(horizon) < count[..., None]
        reward = torch.randn(time, num_envs, horizon, generator=generator)
        reward = torch.where(valid, reward, float("nan"))  # what was not executed must not matter
        terminated = over & (uniform[3] < 0.5)
        ids = torch.arange((time + 1) * num_envs).view(time + 1, num_envs) + 1000 * part
        parts.append(decided(ids, reward, valid, terminated, over & ~terminated))
    return parts[0], parts[1]


def brute_force(parts: tuple[Rollout, ...], gamma: float, n_step: int) -> dict[int, tuple]:
    """{id: (reward, discount, id of what followed or None, return)} of every decision.

    An episode that still runs counts as truncated at its latest observation.
    """
    found = {}
    names = ("reward", "valid", "terminated", "truncated")
    for row in range(parts[0].reward.shape[1]):
        line = []  # (id, rewards of the executed actions, terminated, truncated) of each decision
        for part in parts:
            ids, flags = part.features["id"][:, row].tolist(), [getattr(part, name)[:, row].tolist() for name in names]
            for number, rewards, valid, *ends in zip(ids, *flags, strict=False):
                if any(valid):
                    line.append((number, [r for r, is_valid in zip(rewards, valid, strict=True) if is_valid], *ends))
        latest = int(parts[-1].features["id"][-1, row])
        for i, (number, *_) in enumerate(line):
            steps, power, total, after, known = [], 0, 0.0, None, None
            for j, (at, rewards, terminated, truncated) in enumerate(line[i:], i):
                total += sum(gamma ** (power + k) * reward for k, reward in enumerate(rewards))
                power += len(rewards)
                if terminated:
                    known, after = total, None
                elif truncated:
                    known, after = -np.inf, -1 - at
                else:
                    after = line[j + 1][0] if j + 1 < len(line) else latest
                steps.append((total, 0.0 if after is None else gamma**power, after))
                if known is not None:
                    break
            found[number] = (*steps[min(n_step, len(steps)) - 1], -np.inf if known is None else known)
    return found


def test_n_steps_equal_brute_force_on_120_ragged_cases():
    generator, ends = seeded(), 0
    for case in range(120):
        parts, gamma, n_step = numbered(generator), (1.0, 0.99, 0.5)[case % 3], 1 + case % 4
        expected, replay = brute_force(parts, gamma, n_step), Replay(200, gamma, n_step)
        assert sum(replay.add(part) for part in parts) == len(expected) == len(replay)
        found = replay.transitions(replay.decisions())
        assert sorted(found.features["id"].tolist()) == sorted(expected)
        reward, discount, after, total = zip(*(expected[name] for name in found.features["id"].tolist()), strict=True)
        np.testing.assert_allclose(found.reward, reward, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.discount, discount, rtol=1e-5)
        np.testing.assert_allclose(found.returns, total, rtol=1e-4, atol=1e-5)
        following = zip(after, found.next_features["id"].tolist(), strict=True)
        assert all(wanted is None or wanted == other for wanted, other in following)
        ends += after.count(None)
    assert ends > 120


def test_golden_three_steps():
    replay = Replay(10, 0.99, 3)
    replay.add(line([0.0, 0.0, 1.0], end="truncated"))
    found = replay.transitions(torch.tensor([0]))
    assert found.reward + found.discount * 0.5 == pytest.approx(1.465250, abs=1e-6)
    assert found.next_features["id"] == -3 and found.returns == -torch.inf


def test_tails_of_evicted_episodes_stay_valid():
    capacity = 37
    small, roomy, maker = Replay(capacity, GAMMA, 3), Replay(ROOMY, GAMMA, 3), source(4, 3)
    sizes, full = set(), 0
    for _ in range(20):
        window = maker.next()
        assert small.add(window) == min(roomy.add(window), len(small))
        _, size, running = roomy._filled
        newest = torch.arange(max(0, size + running - capacity), size + running)
        present = newest[roomy.columns["remaining"][newest] > 0]
        intact = present[present >= full - capacity]  # running episodes took the place of older ones
        assert sorted((intact % capacity).tolist()) == small.decisions().tolist()
        for name, item in roomy.columns.items():
            assert torch.equal(small.columns[name][intact % capacity], item[intact])
        ended_slots = intact[intact < size] % capacity
        audit(small.transitions(ended_slots), 4, 3)
        audit_running(small.transitions(intact[intact >= size] % capacity), maker, 4, 3)
        sizes.add(sum(item.numel() for item in small.columns.values()))
        full = max(full, size + running)
    assert full > 5 * capacity and len(sizes) == 1


def test_new_decisions_are_counted_although_old_ones_are_evicted():
    replay = Replay(8, 1.0)
    assert [replay.add(line([1.0] * 4, number)) for number in (0, 10, 20)] == [4, 4, 4] and len(replay) == 6
    assert replay.add(line([1.0] * 7)) == 7 == len(replay)


def test_groups_of_any_length_side_by_side():
    """Columns of ``GroupSource`` idle after their end, and each is an episode of its own."""
    config = GroupConfig(groups=3, size=4, ahead=2, limit=40)
    maker = config.build(LuckyEnv(7), AuditingPolicy(4), SeedStream(START, START + 1000), torch.Generator())
    replay, rollouts = Replay(ROOMY, GAMMA, 3), [maker.next() for _ in range(3)]
    idle = sum(int((~part.valid.any(-1)).sum()) for part in rollouts)
    assert sum(replay.add(part) for part in rollouts) == sum(int(part.valid.any(-1).sum()) for part in rollouts)
    assert idle > 10 and not replay._filled[2]
    found = replay.transitions(replay.decisions())
    for b, (seed, steps) in enumerate(found.features["counters"].tolist()):
        after = min(steps + 12, length_of(seed))
        assert found.next_features["counters"][b].tolist() == [seed, after] or not found.discount[b]
        assert (found.discount[b] == 0) == (after == length_of(seed) and seed % 2 == 0)


def test_an_episode_that_was_broken_off_is_truncated():
    """A source whose environment has no snapshots resets its environments when a run is resumed."""
    replay = Replay(20, 1.0, 5)
    assert replay.add(line([1.0, 1.0], seed=3, end="")) == 2
    assert replay.add(line([5.0, 5.0], 10, seed=4)) == 2
    found = replay.transitions(replay.decisions())
    assert found.returns.tolist() == [-np.inf, -np.inf, 10.0, 5.0] and found.reward.tolist() == [2.0, 1.0, 10.0, 5.0]
    assert found.next_features["id"][:2].tolist() == [2, 2] and found.discount[:2].tolist() == [1.0, 1.0]


def test_one_broken_off_inside_a_window_ends_before_that_action():
    """Nobody saw what that action led to."""
    replay, seeds = Replay(20, 1.0, 5), torch.tensor([3, 3, 3, 4, 4])[:, None]
    replay.add(line([1.0] * 5, seeds=seeds))
    found = replay.transitions(replay.decisions())
    assert found.features["id"].tolist() == [0, 1, 3, 4] and found.next_features["id"][:2].tolist() == [2, 2]
    assert found.reward.tolist() == [2.0, 1.0, 2.0, 1.0]


def test_interventions_are_a_view():
    acted = torch.tensor([False, True, False, True])[:, None, None]
    replay = Replay(20, 1.0)
    view = Interventions(replay)
    assert len(view) == 0 and view.state_dict() == {}
    with pytest.raises(UserError, match="holds no such decision"):
        view.sample(2, seeded())
    replay.add(line([1.0, 2.0, 3.0, 4.0], intervened=acted))
    drawn = view.sample(50, seeded())
    assert len(view) == 2 and view.add(line([1.0])) == 0 and len(replay) == 4
    assert set(drawn.features["id"].tolist()) == {1, 3} and drawn.intervened.all()


def test_a_saved_replay_resumes_bit_for_bit(tmp_path):
    """Running episodes included; it can be saved again at once, and a full ring continues at its cursor."""
    windows = [window for maker in [source()] for window in (maker.next() for _ in range(6))]
    for capacity, folder in ((ROOMY, tmp_path / "roomy"), (60, tmp_path / "full")):
        replay = Replay(capacity, GAMMA, 3)
        for window in windows[:3]:
            replay.add(window)
        save_state(folder, 1, replay.state_dict())
        once = Replay(capacity, GAMMA, 3)
        once.load_state_dict(latest_state(folder)[1])
        save_state(folder, 2, once.state_dict())
        resumed = Replay(capacity, GAMMA, 3)
        resumed.load_state_dict(latest_state(folder)[1])
        assert len(resumed) == len(replay) > 20
        for window in [None, *windows[3:]]:
            if window is not None:
                assert replay.add(window) == resumed.add(window)
            assert same(replay.sample(64, seeded(7)), resumed.sample(64, seeded(7)))


def test_a_full_replay_loads_into_a_larger_one():
    """The ring of the larger one has its end elsewhere: no slot of another episode or of zeros may be read."""
    windows = [window for maker in [source()] for window in (maker.next() for _ in range(12))]
    for capacity in (40, 53, 61, 74):
        small = Replay(capacity, GAMMA, 3)
        for window in windows[:8]:
            small.add(window)
        large = Replay(ROOMY, GAMMA, 3)
        large.load_state_dict(small.state_dict())
        one, two = (by_id(replay.transitions(replay.decisions())) for replay in (small, large))
        assert one == two and len(two) == len(large) == len(small) > 10
        for window in windows[8:]:
            large.add(window)
        assert len(large) == len(small) + sum(window.valid.any(-1).sum() for window in windows[8:])
        everything = Replay(ROOMY, GAMMA, 3)
        for window in windows:
            everything.add(window)
        true, found = (by_id(replay.transitions(replay.decisions())) for replay in (everything, large))
        assert found.items() <= true.items() and len(found) == len(large)


def by_id(found: Transitions) -> dict[tuple[int, ...], tuple[object, ...]]:
    """{(seed, step): everything about the decision}."""
    after = [
        tuple(item) if discount else ()
        for item, discount in zip(found.next_features["counters"].tolist(), found.discount.tolist(), strict=True)
    ]
    rest = zip(found.reward.tolist(), found.discount.tolist(), found.returns.tolist(), after, strict=True)
    return dict(zip(map(tuple, found.features["counters"].tolist()), rest, strict=True))


def test_rollouts_that_cannot_be_kept_are_named():
    for wrong in ({"capacity": 1}, {"gamma": 0.0}, {"n_step": 0}):
        with pytest.raises(UserError, match="cannot hold or value a decision"):
            Replay(**{"capacity": 9, "gamma": 0.9, **wrong})
    replay = Replay(4, 0.9)
    with pytest.raises(UserError, match="holds no such decision yet"):
        replay.sample(1, seeded())
    with pytest.raises(UserError, match="an episode of 4 decisions does not fit into a replay buffer of 4 slots"):
        replay.add(line([1.0] * 4))
    replay.add(line([1.0] * 3))
    other = line([1.0])
    with pytest.raises(ContractError, match=r"'executed' of shape \[1, 2\] to a replay buffer that holds \[1, 1\]"):
        replay.add(replace(other, executed=torch.zeros(1, 1, 1, 2)))
    with pytest.raises(ContractError, match=r"'features/id' of shape None"):
        replay.add(replace(other, features={}))
    with pytest.raises(UserError, match="holds 4 slots but this one has 3"):
        Replay(3, 0.9).load_state_dict(replay.state_dict())


# -- in files: equal to one in memory, readable by the next process, never misread -------------------------------------


def on_disk(folder, capacity=60, gamma=GAMMA, n_step=3):
    return Replay(capacity, gamma, n_step, OnDisk(folder))


def test_on_the_disk_equals_in_memory_and_outlives_the_process(tmp_path):
    """The ring has wrapped; another number of steps may use the same decisions."""
    one, two = filled(Replay(60, GAMMA, 3, InMemory())), filled(on_disk(tmp_path))
    reopened, farther = on_disk(tmp_path), on_disk(tmp_path, n_step=5)
    for replay in (two, reopened):
        assert len(replay) == len(one) > 30 and replay.columns.keys() == one.columns.keys()
        assert all(torch.equal(item, replay.columns[name]) for name, item in one.columns.items())
        assert same(one.sample(64, seeded(1)), replay.sample(64, seeded(1)))
    audit(farther.transitions(of_ended_episodes(farther)), 4, 5)
    for replay in (one, reopened):
        filled(replay, windows=1)
    assert all(torch.equal(item, reopened.columns[name]) for name, item in one.columns.items())


def test_a_resumed_run_has_what_is_on_disk_and_what_runs(tmp_path):
    windows = [window for maker in [source()] for window in (maker.next() for _ in range(4))]
    one, two = Replay(60, GAMMA, 3), on_disk(tmp_path / "replay")
    for window in windows[:2]:
        one.add(window), two.add(window)
    save_state(tmp_path / "state", 1, {"replay": two.state_dict()})
    assert not two.state_dict()["columns"] and two.state_dict()["running"]
    resumed = on_disk(tmp_path / "replay")
    resumed.load_state_dict(latest_state(tmp_path / "state")[1]["replay"])
    for window in windows[2:]:
        assert one.add(window) == resumed.add(window)
    assert same(one.sample(64, seeded(1)), resumed.sample(64, seeded(1)))


def test_the_next_process_knows_the_robots(tmp_path):
    first = on_disk(tmp_path)
    for robot in ("left", "right"):
        first.add(line([1.0, 1.0], robot=robot, stream=robot))
    second = on_disk(tmp_path)
    second.add(line([1.0], robot="right", stream="right"))
    found = second.transitions(second.decisions())
    assert [second.robots[i] for i in found.robot] == ["left", "left", "right", "right", "right"]


def test_other_numbers_are_refused(tmp_path, monkeypatch):
    filled(on_disk(tmp_path))
    with pytest.raises(UserError, match=r"made with gamma 0\.9 but this is 0\.5, so its decisions would be misread"):
        on_disk(tmp_path, gamma=0.5)
    with pytest.raises(UserError, match="made with capacity 60 but this is 61"):
        on_disk(tmp_path, 61)
    monkeypatch.setattr("vla_rl.experience.replay.CONTRACT_VERSION", CONTRACT_VERSION + 1)
    with pytest.raises(UserError, match=f"made with contract_version {CONTRACT_VERSION} but this is"):
        on_disk(tmp_path)


def test_damage_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot be used .* so nothing was kept"):
        (tmp_path / "file").write_text("")
        filled(on_disk(tmp_path / "file" / "replay"))
    filled(on_disk(tmp_path), windows=1)
    path, meta = tmp_path / "reward.bin", (tmp_path / "replay.json").read_text()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"reward\.bin' has 236 bytes where 240 are needed"):
        on_disk(tmp_path)
    path.write_bytes(whole)
    wrong = json.loads(meta)
    wrong["columns"]["reward"] = [[], "float33"]
    for text in (meta[:-9], "[]", json.dumps(wrong), json.dumps({"capacity": 60})):
        (tmp_path / "replay.json").write_text(text)
        with pytest.raises(UserError, match=r"replay\.json' is damaged .*delete the folder"):
            on_disk(tmp_path)


@pytest.mark.parametrize("written", range(0, 10, 3))
def test_killed_inside_a_write_there_are_only_whole_decisions(tmp_path, written):
    """The decisions that were being overwritten are gone, the new ones are missing; all others are untouched."""

    class Dying(dict):
        """Columns of which only so many can still be written."""

        left = 1 + written

        def __getitem__(self, name):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return super().__getitem__(name)

    replay = on_disk(tmp_path, 9, 1.0, 1)
    for number in (0, 10):
        replay.add(line([1.0, 2.0, 3.0], number))
    replay.columns = Dying(replay.columns)
    replay._require_fit = lambda columns: None
    with pytest.raises(Killed):
        replay.add(line([7.0, 8.0, 9.0], 20))
    resumed = on_disk(tmp_path, 9, 1.0, 1)
    found = resumed.transitions(resumed.decisions())
    whole = {number + i: start + i for number, start in ((0, 1.0), (10, 1.0)) for i in range(3)}
    kept = dict(zip(found.features["id"].tolist(), found.reward.tolist(), strict=True))
    assert kept.items() <= whole.items() and kept.keys() == {10, 11, 12}
    resumed.add(line([7.0, 8.0, 9.0], 20))
    assert set(resumed.transitions(resumed.decisions()).features["id"].tolist()) == {10, 11, 12, 20, 21, 22}
