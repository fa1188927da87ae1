"""A policy of ours behind openpi's protocol: chunks for whoever asks as openpi's clients do, and nothing for others."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from sims.toy import counting, point_mass
from tests.patience import PATIENCE, wait_until
from tests.serving.openpi_style import OpenpiStyle, asked, packed
from tests.serving.served import CHUNK, NoisyPolicy, echo_policy, homewards, serving_openpi
from tests.serving.test_remote import only_state, state_only
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.function import BlackBoxPolicy, FunctionPolicy
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.openpi import LiberoLayout, fitted
from vla_rl.serving.served import Asked, Batching, SessionPolicy
from vla_rl.serving.websocket import Connection

SOON = 120.0  # seconds in which a server that answers pings has done so on any machine


class Gate:
    """A policy's function that waits to be let through, and notes what it was asked in one call."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)
        self.seeds: list[list[int]] = []

    def __call__(self, obs):
        self.seeds.append(obs.state[:, 0].astype(int).tolist())
        self.entered.release()
        assert self.open.acquire(timeout=PATIENCE)
        if 13 in self.seeds[-1]:
            raise KeyError("thirteen")
        return np.where(obs.state[:, :1, None] == 14, np.nan, echo_policy().function(obs))

    def policy(self) -> FunctionPolicy:
        return FunctionPolicy(counting.spec(), self)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)


def test_an_openpi_client_gets_chunks():
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as client:
        first, second = client.infer(asked(seed=4)), client.infer(asked(seed=8))
    assert first["actions"].tolist() == [[k, 4] for k in range(CHUNK)] and first["actions"].dtype == np.float32
    assert second["actions"].tolist() == [[k, 8] for k in range(CHUNK)], "no request depends on the one before"
    assert first["policy_timing"]["batch_size"] == 1
    assert 0 <= first["policy_timing"]["infer_ms"] <= first["server_timing"]["infer_ms"]
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]


def test_the_metadata_say_what_a_request_holds():
    spec = counting.spec()
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as client:
        said = client.metadata
    assert server.pages == {"/healthz": "OK\n"}
    assert said["policy"] == "FunctionPolicy" and said["server"].startswith("vla-rl ") and said["layout"] == "libero"
    assert said["keys"] == ["observation/image", "observation/state", "prompt"]
    assert said["images"] == {"audit": [4, 4, 3]} and said["state"]["size"] == 4 and said["prompts"] == list(spec.tasks)
    assert said["actions"] == {"size": 2, "names": list(spec.action.names), "unit": spec.action.unit, "max_chunk": 8}


def test_a_layout_of_the_users_own_is_named_and_reads_requests():
    seen = SingleObservation({}, np.zeros(2, np.float32), point_mass.spec().tasks[0])
    policy = FunctionPolicy(point_mass.spec(), homewards)
    with serving_openpi(policy, layout=only_state) as server, OpenpiStyle(server.url) as client:
        assert client.metadata["layout"] == "tests.serving.test_remote:only_state"
        assert "keys" not in client.metadata
        assert client.infer(dict(state_only(seen)))["actions"].shape == (1, 2)
        assert "the policy failed (KeyError: 'state')" in client.complaint(packed(asked()))
        assert client.infer(dict(state_only(seen)))["actions"].shape == (1, 2)


def test_pictures_are_scaled_without_distortion_and_padded_with_black():
    spec = counting.spec()
    high = np.full((16, 8, 3), 200, np.uint8)
    for picture, lit in ((high, np.s_[:, 1:3]), (high.swapaxes(0, 1), np.s_[1:3, :]), (high[:4, :4], np.s_[:, :])):
        found = fitted(SingleObservation({"audit": picture}, np.zeros(4), spec.tasks[0]), spec).images["audit"]
        expected = np.zeros((4, 4, 3), np.uint8)
        expected[lit] = 200
        assert np.array_equal(found, expected)


def test_float_pictures_with_channels_first_are_read_as_openpi_reads_them():
    spec = counting.spec()
    floats = np.linspace(0.0, 1.0, 48, dtype=np.float32).reshape(3, 4, 4)
    seen = LiberoLayout(spec)(asked(observation_image=floats))
    expected = (255 * floats).astype(np.uint8).transpose(1, 2, 0)
    assert np.array_equal(seen.checked(spec).images["audit"], expected)


# -- several clients ---------------------------------------------------------------------------------------------------


def test_clients_that_ask_together_are_answered_by_one_forward_pass_each_its_own_chunk():
    gate = Gate()
    with serving_openpi(gate.policy(), batching=Batching(wait_ms=60_000.0)) as server, ExitStack() as opened:
        clients = [opened.enter_context(OpenpiStyle(server.url)) for _ in range(5)]
        seeds = [2, 3, 4, 5]
        for _ in clients:
            gate.open.release()
        for client, seed in zip(clients, [6, *seeds], strict=True):
            client.ask(asked(seed=seed))
        answers = [client.read() for client in clients]
    assert sorted(gate.seeds[0]) == [2, 3, 4, 5, 6] and len(gate.seeds) == 1
    assert [answer["actions"][0, 1] for answer in answers] == [6, *seeds]
    assert {answer["policy_timing"]["batch_size"] for answer in answers} == {5}


def test_a_client_counts_before_it_can_ask(monkeypatch):
    clients, send = [], Connection.send

    def counted(connection, data):
        clients.append(server.batcher._clients)
        send(connection, data)

    monkeypatch.setattr(Connection, "send", counted)
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url):
        assert clients == [1], "when it gets the metadata"


def test_a_batch_has_a_largest_size():
    gate = Gate()
    with serving_openpi(gate.policy(), batching=Batching(size=2, wait_ms=0.0)) as server, ExitStack() as opened:
        clients = [opened.enter_context(OpenpiStyle(server.url)) for _ in range(4)]
        clients[0].ask(asked(seed=0))
        gate.wait()
        for seed, client in enumerate(clients[1:], 1):
            client.ask(asked(seed=seed))
        wait_until(lambda: len(server.batcher._waiting) == 3)
        for _ in clients:
            gate.open.release()
        answers = [client.read() for client in clients]
    assert [answer["actions"][0, 1] for answer in answers] == [0, 1, 2, 3]
    assert [len(seeds) for seeds in gate.seeds] == [1, 2, 1]


def test_a_request_that_the_policy_cannot_take_spoils_no_other():
    gate = Gate()
    with serving_openpi(gate.policy(), batching=Batching(wait_ms=60_000.0)) as server, ExitStack() as opened:
        clients = [opened.enter_context(OpenpiStyle(server.url)) for _ in range(3)]
        for _ in range(4):
            gate.open.release()
        for client, seed in zip(clients, (13, 14, 15), strict=True):
            client.ask(asked(seed=seed))
        said = [client.socket.recv(PATIENCE) for client in clients[:2]]
        assert clients[2].read()["actions"][0, 1] == 15
        for client in clients[1:]:
            client.socket.close()
        gate.open.release()
        assert clients[0].infer(asked(seed=3))["actions"][0, 1] == 3, "its connection goes on"
    assert sorted(gate.seeds[0]) == [13, 14, 15]
    assert "failed (KeyError: 'thirteen'" in said[0] and "Traceback" not in said[0]
    assert "not finite, so none is sent" in said[1]


def chunks_of(served: SessionPolicy, seen: list[SingleObservation]) -> list[np.ndarray]:
    found = served.decide([Asked(one, {}) for one in seen])
    assert not any(isinstance(item, Exception) for item in found)
    return [chunk for chunk, _ in found]


def test_what_a_request_draws_depends_on_it_and_the_seed_and_on_no_other_request():
    policy = NoisyPolicy(point_mass.spec(), "noise")
    tasks = point_mass.spec().tasks
    seen = [SingleObservation({}, np.full(2, 0.1 * k, np.float32), tasks[0]) for k in range(3)]
    together = chunks_of(SessionPolicy(policy, 1), seen)
    alone = [chunks_of(SessionPolicy(policy, 1), [one])[0] for one in reversed(seen)][::-1]
    assert np.array_equal(together, alone)
    assert len({chunk.tobytes() for chunk in together}) == 3
    assert not np.array_equal(chunks_of(SessionPolicy(policy, 2), seen)[0], together[0])


class FarPolicy(BlackBoxPolicy):
    """Forty actions beyond every bound, which it does not clip itself."""

    def act(self, features, state, mode, generator):
        far = torch.full((len(features["time"]), 40, 2), 1e9)
        return ActionOut(far, far, far[:, 0, 0]), state


def test_actions_stay_within_the_bounds_and_the_chunk_that_an_environment_takes():
    with serving_openpi(FarPolicy(counting.spec(), "far")) as server, OpenpiStyle(server.url) as client:
        chunk = client.infer(asked())["actions"]
    assert chunk.shape == (counting.spec().max_chunk, 2) and chunk[0].tolist() == [64.0, 1 << 20]


def test_pings_are_answered_while_the_policy_computes():
    """openpi issue 717: a server that does not answer them is taken for dead by its clients."""
    gate = Gate()
    with serving_openpi(gate.policy()) as server, OpenpiStyle(server.url) as client:
        client.ask(asked(seed=3))
        gate.wait()
        for _ in range(3):
            assert client.socket.ping().wait(SOON)
        gate.open.release()
        assert client.read()["actions"][0, 1] == 3


def test_nothing_is_computed_for_a_client_that_has_left(caplog):
    caplog.set_level(logging.INFO, "vla_rl.serving")
    gate = Gate()
    with serving_openpi(gate.policy()) as server, OpenpiStyle(server.url) as first, OpenpiStyle(server.url) as gone:
        first.ask(asked(seed=1))
        gate.wait()
        gone.ask(asked(seed=2))
        assert gone.socket.ping().wait(PATIENCE)
        gone.socket.close()
        wait_until(lambda: " left" in caplog.text)
        for _ in range(3):
            gate.open.release()
        assert first.read()["actions"][0, 1] == 1
        assert first.infer(asked(seed=3))["actions"][0, 1] == 3
    assert gate.seeds == [[1], [3]]


def test_a_client_that_sends_on_while_the_policy_computes_is_held_up_and_answered_in_order():
    gate = Gate()
    with serving_openpi(gate.policy()) as server, OpenpiStyle(server.url) as client:
        for seed in (1, 2, 3):
            client.ask(asked(seed=seed))
            gate.open.release()
        assert [client.read()["actions"][0, 1] for _ in range(3)] == [1, 2, 3]
    assert gate.seeds == [[1], [2], [3]]


def test_a_server_that_stops_says_so_to_those_who_wait():
    gate = Gate()
    with ExitStack() as opened:
        server = opened.enter_context(serving_openpi(gate.policy()))
        first, second = (opened.enter_context(OpenpiStyle(server.url)) for _ in range(2))
        first.ask(asked(seed=1))
        gate.wait()
        second.ask(asked(seed=2))
        assert second.socket.ping().wait(PATIENCE)
        server.batcher.close(0.0)
        assert "the server stops" in second.socket.recv(PATIENCE)
        with pytest.raises(ConnectionClosed) as ended:
            second.socket.recv(PATIENCE)
        assert ended.value.rcvd.code == 1001
        gate.open.release()
        assert first.read()["actions"][0, 1] == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


OBJECTS = {b"__ndarray__": True, b"data": b"\x80\x04N.", b"dtype": "|O", b"shape": [1]}


@pytest.mark.parametrize(
    ("message", "sentence", "code"),
    [
        (b"\xc1", "cannot be read", 1007),
        (packed([1]), "no map with text keys", 1007),
        (packed({"observation/state": OBJECTS}), "dtype '|O'", 1007),
        (packed({"observation/state": {**OBJECTS, b"dtype": "<f8", b"shape": [1 << 40]}}), "does not fit", 1007),
        ("hello", "a request is a text", 1003),
    ],
)
def test_what_is_no_request_ends_the_connection_by_a_code_and_no_other(message, sentence, code):
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as good, OpenpiStyle(server.url) as bad:
        said = bad.complaint(message)
        assert sentence in said and "Traceback" not in said
        with pytest.raises(ConnectionClosedError) as ended:
            bad.socket.recv(PATIENCE)
        assert ended.value.rcvd.code == code
        assert good.infer(asked(seed=6))["actions"][0, 1] == 6
