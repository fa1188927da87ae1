"""Policies that carry a state, and chunks that continue one another, behind openpi's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sims.toy import point_mass
from tests.policies.test_tiny import SPEC, made, observations
from tests.serving.openpi_style import OpenpiStyle, packed
from tests.serving.served import serving_openpi
from tests.serving.test_remote import only_state
from tests.toys import seeded
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import Policy, continue_chunk, encode_observation
from vla_rl.policies.function import BlackBoxPolicy, FunctionPolicy
from vla_rl.policies.real_time_chunking import RealTimeChunking, RealTimeConfig
from vla_rl.policies.residual import DeterministicResidual, ResidualConfig
from vla_rl.serving import openpi
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.openpi import CAMERAS
from vla_rl.serving.remote import RemotePolicy

TASK = point_mass.spec().tasks[0]


def ahead(obs: Observation) -> np.ndarray:
    """[E,4,2]: four actions that tell which observation they were made for."""
    return np.stack([0.01 * obs.state * (k + 1) for k in range(4)], 1)


def residual() -> DeterministicResidual:
    """A correction of every single action, which is not 0, over a base whose chunks have four."""
    base = FunctionPolicy(point_mass.spec(), ahead)
    base.feature_sizes = {"state": 2}  # type: ignore[attr-defined]
    policy = DeterministicResidual(base, base, ResidualConfig(horizon=1))
    for parameter in policy.delta.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=seeded(3))
    return policy


@contextmanager
def served(policy: Policy) -> Iterator[Any]:
    with serving_openpi(policy, layout=only_state) as server:
        yield server


def seen(robot: int, time: int) -> np.ndarray:
    return np.array([0.5 + robot, 0.1 * time - 0.3], np.float32)


def request(robot: int, time: int, **more: Any) -> dict[str, Any]:
    return {"state": seen(robot, time), "prompt": TASK, **more}


def here(policy: Policy, robot: int, times: range) -> list[np.ndarray]:
    """The chunks of an episode in this process, one environment by itself."""
    state, found = policy.reset_state(policy.initial_state(1), np.zeros(1, np.int64)), []
    for time in times:
        obs = Observation({}, seen(robot, time)[None], np.zeros(1, np.int64), np.zeros(1, np.int64))
        features, state = encode_observation(policy, obs, state, seeded(0))
        out, state = policy.act(features, state, "eval", seeded(0))
        found.append(out.action[0].numpy())
    return found


def test_two_robots_that_take_turns_get_what_a_residual_does_in_process_bit_for_bit():
    policy, times = residual(), range(6)
    expected = {robot: here(policy, robot, times) for robot in (0, 1)}
    with served(policy) as server, OpenpiStyle(server.url) as first, OpenpiStyle(server.url) as second:
        assert first.metadata["sessions"] and not first.metadata["real_time"]
        for time in times:
            for robot, client in enumerate((first, second)):
                chunk = client.infer(request(robot, time))["actions"]
                assert chunk.shape == (1, 2) and np.array_equal(chunk, expected[robot][time])
    assert not np.array_equal(expected[0][1], here(policy, 0, range(1, 2))[0]), "the queue matters"


def test_robots_on_one_connection_are_told_apart_by_their_sessions_and_begin_anew_when_they_say_so():
    policy = residual()
    expected = {robot: here(policy, robot, range(3)) for robot in (0, 1)}
    with served(policy) as server, OpenpiStyle(server.url) as client:
        for _ in range(2):
            for time in range(3):
                for robot in (0, 1):
                    asked = request(robot, time, session=f"arm {robot}", reset=time == 0)
                    assert np.array_equal(client.infer(asked)["actions"], expected[robot][time])


def test_a_request_without_an_answer_leaves_its_session_as_it_was():
    policy = residual()
    expected = here(policy, 0, range(3))
    with served(policy) as server, OpenpiStyle(server.url) as client:
        assert np.array_equal(client.infer(request(0, 0))["actions"], expected[0])
        assert "not finite" in client.complaint(packed(request(0, 1) | {"state": np.full(2, np.nan, np.float32)}))
        assert np.array_equal(client.infer(request(0, 1))["actions"], expected[1])
        assert "'reset' is 1" in client.complaint(packed(request(0, 2, reset=1)))
        assert np.array_equal(client.infer(request(0, 2))["actions"], expected[2])


def test_of_too_many_sessions_those_that_asked_last_are_kept(monkeypatch):
    monkeypatch.setattr(openpi, "_MOST_SESSIONS", 2)
    policy = residual()
    expected = here(policy, 0, range(2))
    with served(policy) as server, OpenpiStyle(server.url) as client:
        for name in "abc":
            assert np.array_equal(client.infer(request(0, 0, session=name))["actions"], expected[0])
        assert np.array_equal(client.infer(request(0, 1, session="b"))["actions"], expected[1])
        assert np.array_equal(client.infer(request(0, 1, session="a"))["actions"], here(policy, 0, range(1, 2))[0])


class Counter(BlackBoxPolicy):
    """Its action is how many decisions its environment's episode has had; numpy in, numpy out."""

    def initial_state(self, num_envs):
        return {"count": np.zeros(num_envs)}

    def reset_state(self, state, env_ids):
        count = state["count"].copy()
        count[np.asarray(env_ids)] = 0
        return {"count": count}

    def act(self, features, state, mode, generator):
        count = state["count"]
        return self.action_out(0.01 * np.repeat(count, 2).reshape(-1, 1, 2), len(count)), {"count": count + 1}


def test_our_client_gives_every_environment_a_session_that_begins_with_its_episodes():
    obs = Observation({}, np.zeros((3, 2), np.float32), np.zeros(3, np.int64), np.zeros(3, np.int64))
    layout = "?layout=tests.serving.test_remote:state_only"
    with (
        served(Counter(point_mass.spec(), "count")) as server,
        closing(RemotePolicy(point_mass.spec(), server.url + layout)) as policy,
    ):
        state, counts = policy.initial_state(3), []
        for ended in ([], [1], [], [0, 2]):
            features = policy.encode(obs)
            out, state = policy.act(features, state, "eval", None)
            counts.append((100 * out.action[:, 0, 0]).round().int().tolist())
            state = policy.reset_state(state, np.array(ended, np.int64))
    assert counts == [[0, 0, 0], [1, 1, 1], [2, 0, 2], [3, 1, 3]]


# -- real-time chunking -----------------------------------------------------------------------------------------------


def real_time() -> RealTimeChunking:
    """Over the small flow policy, whose chunks are kept within the bounds."""
    base = made()
    base.action_low.fill_(-1e3)
    base.action_high.fill_(1e3)
    return RealTimeChunking(base, RealTimeConfig("identity"))


def camera_request(obs: Observation, **more: Any) -> dict[str, Any]:
    one = SingleObservation.of(obs, 0, SPEC)
    images = dict(zip(CAMERAS, one.images.values(), strict=False))
    return {**images, "observation/state": one.state, "prompt": one.instruction, **more}


@pytest.mark.parametrize("ours", [True, False], ids=["our client", "a client of openpi's"])
def test_a_chunk_continues_the_prefix_that_the_request_has(ours, monkeypatch):
    """As in process, where the noise is the same: that of a served chunk depends on its observation."""
    policy, (first, second) = real_time(), (observations(1, seed) for seed in (1, 2))
    consumed, delay = 1, 1
    with serving_openpi(policy) as server:
        monkeypatch.setattr(server.served, "_noise_of", lambda seen: 5)
        monkeypatch.setattr("vla_rl.serving.served.action_limits", lambda spec: (torch.tensor(-1e3), torch.tensor(1e3)))

        def decide(obs, state):
            out, state = policy.act(policy.encode(obs), state, "eval", [seeded(5)])
            return out.action[0].numpy(), state

        chunk, state = decide(first, policy.initial_state(1))
        alone, _ = decide(second, policy.initial_state(1))
        continued, _ = decide(second, continue_chunk(policy, state, [0], [consumed], [delay]))
        assert np.abs(continued - alone).max() > 1e-3
        if ours:
            with closing(RemotePolicy(SPEC, server.url)) as remote:
                remote._limits = (torch.tensor(-1e3), torch.tensor(1e3))
                out, held = remote.act(remote.encode(first), remote.initial_state(1), "eval", None)
                told = continue_chunk(remote, held, [0], [consumed], [delay])
                found = remote.act(remote.encode(second), told, "eval", None)[0].action[0].numpy()
                again = remote.act(remote.encode(second), held, "eval", None)[0].action[0].numpy()
            answered = out.action[0].numpy()
        else:
            with OpenpiStyle(server.url) as client:
                assert client.metadata["real_time"]
                answered = client.infer(camera_request(first))["actions"]
                found = client.infer(camera_request(second, prefix=answered[consumed:], delay=delay))["actions"]
                again = client.infer(camera_request(second))["actions"]
    np.testing.assert_allclose(answered, chunk, atol=1e-5)
    np.testing.assert_allclose(found, continued, atol=1e-4)
    np.testing.assert_allclose(again, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prefix": np.zeros((3, 5), np.float32)}, "give [n,2]"),
        ({"prefix": np.zeros((99, SPEC.action_dim))}, "chunks of this policy have"),
        ({"prefix": np.zeros((2, SPEC.action_dim)), "delay": 3}, "delayed by"),
        ({"prefix": np.zeros((2, SPEC.action_dim)), "delay": -1}, "delayed by"),
        ({"prefix": np.full((2, SPEC.action_dim), np.nan)}, "not finite"),
        ({"prefix": np.zeros((2, SPEC.action_dim)), "delay": 0.5}, "no whole number"),
        ({"prefix": "all of it"}, "no array"),
        ({"session": 7}, "send a text"),
        ({"session": "x" * 101}, "send a text"),
    ],
)
def test_odd_entries_of_a_request_are_refused_in_a_sentence_and_the_connection_goes_on(changes, sentence):
    obs = observations(1, 1)
    with serving_openpi(real_time()) as server, OpenpiStyle(server.url) as client:
        said = client.complaint(packed(camera_request(obs, **changes)))
        assert sentence in said and "failed" not in said
        assert client.infer(camera_request(obs))["actions"].ndim == 2


def test_a_policy_that_continues_nothing_refuses_a_prefix():
    with served(FunctionPolicy(point_mass.spec(), ahead)) as server, OpenpiStyle(server.url) as client:
        said = client.complaint(packed(request(0, 0, prefix=np.zeros((2, 2), np.float32), delay=1)))
        assert "--real-time identity" in said
