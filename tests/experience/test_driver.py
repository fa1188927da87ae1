"""The driver: the order of encoding, acting and resetting, the content of a decision, and spans."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import CountingEnv, episode_length
from tests.auditing import AuditingPolicy
from tests.experience.test_rollout import source
from vla_rl.contract.env import Observation, on_host
from vla_rl.contract.errors import NonFiniteError
from vla_rl.contract.policy import ActionOut
from vla_rl.experience import driver
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.experience.driver import KINDS, LIMIT, OWN, Driver, Spans, joined, now, thinned
from vla_rl.experience.sources import Collectors, saved_rollout

SEEDS = [300, 303, 305]


class Recording(AuditingPolicy):
    """Notes every call with the seeds that it concerns."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.calls: list[tuple[str, list[int]]] = []
        self.asked: list[tuple[str, object]] = []

    def encode(self, obs):
        self.calls.append(("encode", obs.state[:, 0].astype(int).tolist()))
        return super().encode(obs)

    def reset_state(self, state, env_ids):
        self.calls.append(("reset", np.asarray(env_ids).tolist()))
        return {**state, "fresh": state["fresh"].index_fill(0, torch.as_tensor(env_ids), True)}

    def act(self, features, state, mode, generator):
        self.calls.append(("act", features["counters"][:, 0].tolist()))
        self.asked.append((mode, generator))
        return super().act(features, state, mode, generator)


def test_every_observation_is_encoded_once():
    policy, generator = Recording(8), torch.Generator()
    driver = Driver(make("counting", num_envs=3), policy, generator, "eval")
    driver.start(SEEDS)
    driver.step()
    ended = np.array([0, 2])
    driver.reset(ended, np.array([310, 312]))
    assert driver.features is driver.features
    driver.step()
    both = [("encode", SEEDS), ("act", SEEDS), ("reset", [0, 2]), ("encode", [310, 303, 312]), ("act", [310, 303, 312])]
    assert policy.calls == [("reset", [0, 1, 2]), *both]
    assert policy.asked == [("eval", generator)] * 2


def test_a_reset_after_encoding_encodes_again():
    """A caller may use the features before it decides to reset."""
    driver = Driver(make("counting", num_envs=3), Recording(4), None)
    driver.start(SEEDS)
    assert driver.features["counters"].tolist() == [[seed, 0] for seed in SEEDS]
    driver.reset(np.array([1]), np.array([400]))
    assert driver.features["counters"].tolist() == [[300, 0], [400, 0], [305, 0]]
    assert driver.step().seeds.tolist() == [300, 400, 305]


def test_a_decision_holds_observation_action_and_step():
    driver = Driver(make("counting", num_envs=3), Recording(4), None, observe="all")
    first = driver.start(SEEDS)
    one, two = driver.step(), driver.step()
    assert one.obs is first and two.obs is one.step.obs and len(one.step.frames) == 4
    assert np.array_equal(one.step.executed, on_host(one.out.action)) and one.features["counters"][:, 1].eq(0).all()
    driver.reset(np.array([0]), np.array([500]))
    assert one.seeds.tolist() == two.seeds.tolist() == SEEDS and driver.seeds.tolist() == [500, *SEEDS[1:]]


def test_surplus_environments_repeat_the_last_seed():
    driver = Driver(make("counting", num_envs=5), AuditingPolicy(4), None)
    assert driver.start(SEEDS).state[:, 0].tolist() == [300, 303, 305, 305, 305]
    assert driver.seeds.tolist() == [300, 303, 305, 305, 305]


def test_final_features_are_of_the_asked_environments():
    driver = Driver(make("counting", num_envs=3), AuditingPolicy(4), None)
    driver.start(SEEDS)
    driver.step()
    before = {name: item.clone() for name, item in driver.state.items()}
    assert driver.final_features(np.array([2, 0]))["counters"].tolist() == [[305, 4], [300, 4]]
    assert all(torch.equal(item, driver.state[name]) for name, item in before.items())
    assert driver.features["counters"].tolist() == [[seed, 4] for seed in SEEDS]


def test_it_steps_until_the_last_environment_has_ended():
    driver = Driver(make("counting", num_envs=3), AuditingPolicy(1), None)
    driver.start(SEEDS)
    decisions = list(driver.until_done())
    assert len(decisions) == episode_length(np.array(SEEDS)).max()
    assert decisions[-1].step.done.all() and not decisions[-2].step.done.all()


def test_the_view_is_what_the_policy_sees_in_final_features_too():
    shown = []

    class Looking(ExpertPolicy):
        def encode(self, obs):
            shown.append(float(obs.state.sum()))
            return super().encode(obs)

    def black(obs: Observation) -> Observation:
        return Observation(obs.images, np.zeros_like(obs.state), obs.task, obs.time)

    driver = Driver(
        make("counting", num_envs=3), Looking(lambda obs: np.zeros((3, 1, 2), np.float32)), None, view=black
    )
    driver.start(SEEDS)
    driver.step()
    driver.final_features(np.array([1]))
    assert shown == [0.0, 0.0]


@pytest.mark.parametrize(("value", "place"), [(np.nan, 0), (np.inf, 2), (-np.inf, 3)])
def test_an_action_that_is_not_finite_moves_nothing(value, place):
    def expert(obs: Observation) -> np.ndarray:
        chunk = np.ones((3, 4, 2), np.float32)
        chunk[1, place, 1] = value
        return chunk

    driver = Driver(make("counting", num_envs=3), ExpertPolicy(expert), None)
    obs = driver.start(SEEDS)
    with pytest.raises(NonFiniteError, match="non-finite action in environment 1"):
        driver.step()
    assert driver.obs is obs and not driver.obs.time.any()


def test_seconds_are_those_of_each_part():
    driver = Driver(make("counting", num_envs=3), AuditingPolicy(4), None)
    driver.start(SEEDS)
    seconds = [dict(driver.seconds)]
    driver.step()
    seconds.append(dict(driver.seconds))
    names = list(driver.seconds)
    assert sum(seconds[0][name] > 0 for name in names) == 1, "only the environment has done something"
    assert [name for name in names if seconds[1][name] == seconds[0][name]] == ["time/wait_s"]


def test_seconds_of_waiting_elsewhere_are_counted_apart():

    class Elsewhere(CountingEnv):
        asked = None

        def step_async(self, chunk, observe="last"):
            self.asked = chunk, observe

        def step_wait(self):
            time.sleep(0.01)
            return self.step(*self.asked)

    driver = Driver(Elsewhere(3), AuditingPolicy(4), None)
    before = driver.start(SEEDS)
    decision = driver.step()
    assert decision.obs is before and driver.env.asked is not None and driver.seconds["time/wait_s"] >= 0.01
    assert decision.step.obs.time.tolist() == [min(4, int(n)) for n in episode_length(np.array(SEEDS))]


def test_the_action_of_an_expert_is_its_sample():
    out, _ = ExpertPolicy(lambda obs: np.full((2, 3, 2), 0.5, np.float32), 2).act(
        ExpertPolicy(lambda obs: obs).encode(make("counting", num_envs=2).reset([0, 1], [3, 4])), {}, "eval", None
    )
    assert isinstance(out, ActionOut) and out.action.shape == (2, 2, 2) and np.array_equal(out.action, out.sample)


# -- spans: what a driver did when, bounded, and in whose lane ---------------------------------------------------------


def seconds(found) -> dict[str, float]:
    rows = np.asarray(found)
    return {kind: float(sum(b - a for k, a, b in rows if KINDS[int(k)] == kind)) for kind in KINDS}


def test_spans_of_one_kind_that_touch_are_one():
    recorder = Spans()
    for kind, start, stop in (("inferring", 1.0, 2.0), ("inferring", 2.00001, 3.0), ("simulating", 3.0, 4.0)):
        recorder.add(kind, start, stop)
    recorder.add("simulating", 4.5, 5.0)
    taken = recorder.take()[OWN]
    assert [KINDS[int(kind)] for kind in taken[:, 0]] == ["inferring", "simulating", "simulating"]
    assert np.allclose(taken[:, 1:] - driver._ZERO, [[1, 3], [3, 4], [4.5, 5]])
    assert recorder.take()[OWN].shape == (0, 3)


def test_too_many_spans_become_fewer_with_the_same_seconds():
    kinds = itertools.cycle(("inferring", "syncing", "simulating"))
    recorder, wanted, at = Spans(), dict.fromkeys(KINDS, 0.0), 0.0
    for i, kind in zip(range(5 * LIMIT), kinds, strict=False):
        length = 0.01 + 0.001 * (i % 7)
        recorder.add(kind, at, at + length)
        wanted[kind] += length
        at += length + 0.002
    taken = recorder.take()[OWN]
    assert len(taken) <= LIMIT
    assert seconds(taken) == pytest.approx(wanted, rel=1e-5)
    assert (taken[1:, 1] >= taken[:-1, 2] - 1e-6).all() and taken[-1, 2] - driver._ZERO <= at


def test_thinning_by_hand():
    """Four spans in the first of 64 parts, one in the last: the order in a part is lost, its seconds are not."""
    found = thinned([(1, 0.0, 1.0), (2, 1.0, 2.0), (1, 2.5, 3.0), (2, 3.0, 5.0), (1, 639.0, 640.0)])
    assert found == [(1, 0.0, 1.5), (2, 1.5, 4.5), (1, 639.0, 640.0)]


def test_a_rollout_brings_the_spans_of_its_collection():
    maker, before = source(4, 6), now()
    rollout, after = maker.next(), now()
    found = rollout.spans[OWN]
    assert set(rollout.spans) == {OWN} and not any("span" in name for name in rollout.info)
    assert before <= found[0, 1] and found[-1, 2] <= after and (found[:, 2] >= found[:, 1]).all()
    assert {KINDS[int(kind)] for kind in found[:, 0]} >= {"simulating", "inferring"}
    info = rollout.info
    assert seconds(found)["simulating"] == pytest.approx(info["time/env_s"], rel=0.05, abs=1e-3)
    assert maker.next().spans[OWN][0, 1] >= found[-1, 2], "the next rollout has its own"


def test_collectors_beside_have_lanes_of_their_own():
    background = Collectors([source(4, 6), source(4, 6)], source(4, 6).policy)
    asked = now()
    rollout = background.next()
    background.close()
    assert list(rollout.spans) == [OWN, "collector 1", "collector 2"]
    (kind, start, stop), *more = rollout.spans[OWN]
    assert not more and KINDS[int(kind)] == "waiting" and asked <= start + 1e-3
    assert all(start <= spans[0, 1] and spans[-1, 2] <= stop for name, spans in rollout.spans.items() if name)


def test_a_saved_rollout_has_no_spans():
    assert saved_rollout(source(4, 6).next())["spans"] == {}


def test_drivers_that_take_turns_share_a_lane_in_order_of_time():
    one, other = np.array([[1, 0.0, 1.0], [2, 3.0, 4.0]]), np.array([[2, 1.0, 3.0]])
    assert joined([{OWN: one}, {OWN: torch.from_numpy(other)}])[OWN][:, 1].tolist() == [0.0, 1.0, 3.0]


def test_the_clock_of_spans_is_the_wall_clock():
    assert now() == pytest.approx(time.time(), abs=1.0)
