"""What the host reads of a decision on a device, and that episodes there are those of the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.elsewhere import ELSEWHERE, elsewhere
from tests.waiting import counted_waits
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, on_host
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.tracker import (
    DIVERGED,
    FAILURES,
    SUCCESS,
    TIME_LIMIT,
    DeviceTracker,
    EpisodeTracker,
    read,
    read_step,
)

ENVS, LIMIT = 4, 9
SPEC = EnvSpec(
    "walk",
    {},
    ArraySpec((2,), "float32", -99.0, 99.0),
    ArraySpec((2,), "float32", (-1.0, -0.5), 1.0),
    ("walk",),
    0.1,
    LIMIT,
    8,
    {"privileged/square": ArraySpec((), "float32", 0.0, 999.0)},
)


def place(array):
    return torch.from_numpy(np.array(array)).to(ELSEWHERE, non_blocking=True)


class Walk:
    """Positions that actions move: done beyond 3, failed below -3; with its rules on the host."""

    def __init__(self):
        self.book, self.position = EpisodeTracker(ENVS, ("fell",)), np.zeros((ENVS, 2), np.float32)
        self.book.begin(np.arange(ENVS), np.arange(ENVS))

    def step(self, chunk, observe="last"):
        return self.book.execute(chunk, SPEC, observe, self._advance, lambda: self._observe(self.book.time))

    def _advance(self, env_ids, action):
        self.position[env_ids] += action
        x = self.position[env_ids, 0]
        cause = np.select([x > 3, x < -3, self.book.time[env_ids] >= LIMIT], [SUCCESS, FAILURES, TIME_LIMIT], 0)
        return x, x > 3, cause

    def _observe(self, time):
        extras = {"privileged/square": self.position[:, 0] ** 2}
        return Observation({}, self.position * 1, time * 0, time * 1, extras)


class WalkThere(Walk):
    """The same with its rules on the device."""

    def __init__(self):
        super().__init__()
        self.book, self.position = DeviceTracker(ENVS, place, ("fell",)), place(self.position)
        self.book.begin(np.arange(ENVS), np.arange(ENVS))

    def step(self, chunk, observe="last"):
        given = torch.as_tensor(chunk, device=ELSEWHERE)
        return self.book.execute_there(given, SPEC, observe, self._advance, self._observe)

    def _advance(self, action, running, time):
        self.position = torch.where(running[:, None], self.position + action, self.position)
        x = self.position[:, 0]
        cause = torch.where(time >= LIMIT, TIME_LIMIT, 0)
        cause = torch.where(x > 3, SUCCESS, torch.where(x < -3, FAILURES, cause))
        return torch.where(running, x, 0.0), torch.where(running, cause, 0)


@pytest.fixture
def waits():
    with elsewhere(), counted_waits() as waits:
        yield waits


def chunks():
    rng = np.random.default_rng(0)
    drift = np.array([1.2, -1.2, 0.0, 0.4], np.float32)[:, None, None]  # beyond the bounds, too
    return [rng.uniform(-0.6, 0.6, (ENVS, length, 2)).astype(np.float32) + drift for length in (2, 1, 5, 4)]


def test_all_kinds_of_numbers_come_in_one_transfer_unchanged(waits):
    given = {
        "flag": torch.tensor([[True, False], [False, True]]),
        "code": torch.tensor([-3, 4, 127], dtype=torch.int8),
        "count": torch.tensor([2**53 - 1, -(2**40)]),
        "reward": torch.tensor([0.1, float("nan"), float("-inf"), 3e38, 1e-45]),
        "one": torch.tensor(7.5),
        "none": torch.zeros(0, 3),
    }
    found = read({"host": np.arange(3)} | {name: item.to(ELSEWHERE) for name, item in given.items()})
    assert waits["read"] == 1 and found["host"].tolist() == [0, 1, 2]
    for name, item in given.items():
        assert found[name].dtype == item.numpy().dtype
        np.testing.assert_array_equal(found[name], item.numpy())


def test_episodes_on_a_device_are_the_hosts_and_wait_once(waits):
    ours, theirs = WalkThere(), Walk()
    for chunk in chunks():
        given = torch.from_numpy(chunk).to(ELSEWHERE)
        waits.clear()
        one, other = ours.step(given, "all"), theirs.step(chunk, "all")
        told = read_step(one)
        assert waits == {"read": 1} and told.finite
        for name in ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened"):
            found, expected = on_host(getattr(one, name)), getattr(other, name)
            assert found.dtype == expected.dtype and np.array_equal(found, expected), name
            assert np.array_equal(getattr(told, name, expected), expected), name
        assert one.cause == other.cause and np.array_equal(told.done, other.done)
        for frame, expected in zip((one.obs, *one.frames), (other.obs, *other.frames), strict=True):
            assert np.array_equal(on_host(frame.state), expected.state)
            assert np.array_equal(on_host(frame.time), expected.time)
    assert set(one.cause) == {"success", "fell", "time_limit"} and told.done.all()


def test_what_was_replaced_in_a_step_is_read_anew(waits):
    step = WalkThere().step(chunks()[0])
    changed = replace(step, reward=step.reward * 2, terminated=~step.terminated)
    waits.clear()
    told = read_step(changed)
    assert waits == {"read": 1} and told.terminated.all()
    assert np.array_equal(told.reward, 2 * read_step(step).reward)
    broken = replace(step, obs=replace(step.obs, state=step.obs.state * float("nan")))
    assert read_step(step).finite and not read_step(broken).finite


def test_a_resets_observation_is_looked_at_with_the_next_step(waits):
    env = WalkThere()
    for factor, finite in ((1.0, True), (float("nan"), False)):
        obs = env._observe(place(env.book.time))
        obs = env.book.begun(replace(obs, state=obs.state * factor))
        given = torch.from_numpy(chunks()[0]).to(ELSEWHERE)
        waits.clear()
        told = read_step(env.step(given), obs)
        assert told.finite is finite and waits["read"] == (1 if finite else 2)  # once more, for somebody else's


@pytest.mark.parametrize("where", ["state", "extras", "reward"])
def test_what_is_not_finite_on_a_device_is_known_with_the_step(waits, where):
    class Spoilt(WalkThere):
        def _advance(self, action, running, time):
            reward, cause = super()._advance(action, running, time)
            return (reward / 0.0 if where == "reward" else reward), cause

        def _observe(self, time):
            obs = super()._observe(time)
            extras = {name: item / 0.0 for name, item in obs.extras.items()}
            return replace(obs, **{"state": {"state": obs.state / 0.0}, "extras": {"extras": extras}}.get(where, {}))

    assert not read_step(Spoilt().step(chunks()[1])).finite


def test_an_action_that_is_not_finite_moves_nothing(waits):
    env = WalkThere()
    env.step(chunks()[0])
    before, time = on_host(env.position).copy(), env.book.time.copy()
    bad = chunks()[1].copy()
    bad[3, 0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"action\[3,0,1\] is inf \(environment 3 at control step 2\)"):
        env.step(bad)
    assert np.array_equal(on_host(env.position), before) and np.array_equal(env.book.time, time)
    env.book.end(np.array([3]), np.array([False]), np.array([TIME_LIMIT]))
    step = read_step(env.step(bad))
    assert step.valid[:, 0].tolist() == [True, True, True, False] and step.finite
    for shape in ((ENVS, 9, 2), (ENVS, 1, 3), (3, 1, 2), (ENVS, 2)):
        with pytest.raises(ContractError, match="the action chunk has shape"):
            env.step(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "cause, name, terminated, truncated",
    [
        (0, "", False, False),
        (SUCCESS, "success", True, False),
        (TIME_LIMIT, "time_limit", False, True),
        (DIVERGED, "diverged", False, True),
        (FAILURES, "fell", True, False),
        (FAILURES + 1, "broke", True, False),
        (FAILURES + 2, "uncertainty", False, True),
    ],
)
def test_a_cause_terminates_or_truncates(cause, name, terminated, truncated):
    book = EpisodeTracker(3, failures=("fell", "broke"), cuts=("uncertainty",))
    book.begin(np.arange(3), np.arange(3))
    book.end(np.array([1]), np.array([cause == SUCCESS]), np.array([cause]))
    flags = book.flags()
    assert flags["cause"] == ("", name, "")
    assert flags["terminated"].tolist() == [False, terminated, False]
    assert flags["truncated"].tolist() == [False, truncated, False]
    assert flags["success"].tolist() == [False, cause == SUCCESS, False]
    assert book.done.tolist() == [False, cause != 0, False]
    book.end(np.array([0]), np.array([True]), np.array([SUCCESS]))
    assert flags["cause"] == ("", name, ""), "those of a step stay as they were"
