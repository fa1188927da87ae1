"""A policy of ours behind the harness's protocol: its actions, one per observation, and what is refused."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest

from sims.toy import counting, point_mass
from tests.patience import PATIENCE, wait_until
from tests.serving.served import CHUNK, Benchmark, NoisyPolicy, counted, echo_policy, serving
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.function import FunctionPolicy
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.served import ServedPolicy
from vla_rl.serving.vla_eval import Kind, PolicyServer, introduction


def test_every_observation_gets_the_next_action_of_the_chunk():
    asked = []

    def echoing(obs):
        asked.append(int(obs.time[0]))
        return echo_policy().function(obs)

    with serving(FunctionPolicy(counting.spec(), echoing)) as server, Benchmark(server.url) as benchmark:
        benchmark.start()
        actions = [benchmark.act(counted(seed=9, steps=step)) for step in range(7)]
    assert np.array(actions).tolist() == [[step, 9] for step in range(7)]
    assert asked == [0, CHUNK, 2 * CHUNK], "the policy decides when its chunk is executed, as in our environments"
    assert actions[0].dtype == np.float32 and actions[0].shape == (2,)


def test_what_an_episode_draws_depends_on_its_task_and_the_seed_alone():
    payload = {"images": {}, "states": np.zeros(2, np.float32), "task_description": point_mass.spec().tasks[0]}
    policy = NoisyPolicy(point_mass.spec(), "noise")

    def drawn(url: str, episodes: list[int]) -> dict[int, list[list[float]]]:
        with Benchmark(url) as benchmark:
            found = {}
            for episode in episodes:
                benchmark.start(episode_idx=episode)
                found[episode] = [benchmark.act(payload).tolist() for _ in range(3)]
            return found

    with serving(policy) as server:
        first, other = drawn(server.url, [0, 1, 2]), drawn(server.url, [2, 0])
    assert other == {2: first[2], 0: first[0]}
    flat = [number for steps in first.values() for step in steps for number in step]
    assert len(set(flat)) == len(flat)
    with serving(policy, seed=2) as server:
        assert drawn(server.url, [0])[0] != first[0]


def test_hello_says_what_the_policy_needs():
    with serving(echo_policy()) as server, Benchmark(server.url) as benchmark:
        hello = benchmark.hello
    assert hello.kind is Kind.HELLO and hello.seq == 1 and hello.payload["protocol_version"] == 1
    assert hello.payload["harness_version"].startswith("vla-rl ")
    assert hello.payload["model_server"] == "FunctionPolicy"
    assert hello.payload["observation_params"] == {"send_state": True}
    assert set(hello.payload["observation_spec"]) == {"audit", "state", "language"}
    assert hello.payload["action_spec"]["actions"]["dims"] == 2
    policy, spec = echo_policy(), counting.spec()
    policy.spec = replace(spec, images={**spec.images, "wrist": spec.images["audit"]})
    assert introduction(ServedPolicy(policy, 0))["observation_params"]["send_wrist_image"]


def test_an_observation_outside_an_episode_is_an_error():
    with serving(echo_policy()) as server, Benchmark(server.url) as benchmark:
        assert "outside an episode" in benchmark.fail(counted())
        benchmark.start()
        benchmark.act(counted())
        benchmark.tell(Kind.EPISODE_END, {})
        assert "outside an episode" in benchmark.fail(counted())


def test_a_policy_that_fails_is_an_error_and_the_server_goes_on(caplog):
    def broken(obs):
        if obs.state[0, 0] == 13:
            raise KeyError("thirteen")
        return np.full((1, 1, 2), np.nan if obs.state[0, 0] == 14 else 1.0)

    with serving(FunctionPolicy(counting.spec(), broken)) as server, Benchmark(server.url) as benchmark:
        benchmark.start()
        assert "failed (KeyError: 'thirteen'" in benchmark.fail(counted(seed=13))
        assert "not finite, so none is sent" in benchmark.fail(counted(seed=14))
        assert benchmark.act(counted(seed=1)).tolist() == [1, 1]
    assert "test_server.py:" in caplog.text, "the server's own log has the place"


def renamed(payload):
    return SingleObservation({"audit": payload["images"]["top"]}, payload["robot"][:4], payload["words"].strip("."))


def test_a_layout_of_the_users_own_translates():
    payload = counted(seed=2)
    robot = np.concatenate([payload["states"], [7.0]])
    foreign = {
        "images": {"top": payload["images"]["audit"]},
        "robot": robot,
        "words": payload["task_description"] + ".",
    }
    with serving(echo_policy(), layout=renamed) as server, Benchmark(server.url) as benchmark:
        benchmark.start()
        assert benchmark.act(foreign).tolist() == [0, 2]
        assert "the policy failed (KeyError: 'top')" in benchmark.fail(payload)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_more_connections_than_allowed_are_refused_until_one_leaves():
    with serving(echo_policy(), max_connections=1) as server:
        with Benchmark(server.url) as only:
            with pytest.raises(UserError, match=r"did not open a WebSocket|broke the connection"):
                Benchmark(server.url)
            only.start()
            assert only.act(counted(seed=1)).tolist() == [0, 1]
        wait_until(lambda: has_a_place(server.url))


def has_a_place(url: str) -> bool:
    try:
        Benchmark(url).connection.close()
    except UserError:
        return False
    return True


def test_only_this_machine_is_served_and_a_taken_port_is_said():
    with serving(echo_policy()) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=r"cannot be served on .* choose another one"):
            PolicyServer(ServedPolicy(echo_policy(), 0), server.server_address[1])
        with socket.create_connection(server.server_address, timeout=PATIENCE) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"".join(iter(lambda: sock.recv(4096), b"")).endswith(b'{"status": "ok"}\n')


def test_a_policy_that_cannot_be_served_is_said():
    class Bare:
        version = 0

    with pytest.raises(UserError, match="Bare has no spec"):
        ServedPolicy(Bare(), 0)
    policy, depth = echo_policy(), ArraySpec((2,), "float32", 0.0, 1.0)
    policy.spec = replace(policy.spec, extras={"privileged/cube": depth})
    ServedPolicy(policy, 0)
    policy.spec = replace(policy.spec, extras={"depth": depth, "privileged/cube": depth})
    with pytest.raises(UserError, match="trained with depth, which the protocol does not carry"):
        ServedPolicy(policy, 0)
