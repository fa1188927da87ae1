"""Whatever bytes come in: an answer or a refusal of one sentence, and everybody else is answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sims.toy import counting
from tests.patience import PATIENCE
from tests.serving.openpi_style import OpenpiStyle, asked, packed
from tests.serving.served import PATIENT, echo_policy, serving_openpi
from tests.serving.test_websocket import OPENING, frame
from vla_rl.contract.errors import ContractError
from vla_rl.serving import openpi, websocket
from vla_rl.serving.openpi import LiberoLayout, OpenpiServer, fitted

SPEC = counting.spec()
repeatably = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
KEYS = st.sampled_from(["observation/image", "observation/wrist_image", "observation/state", "prompt"]) | st.text(
    max_size=9
)
SMALL = st.integers(-(1 << 63), (1 << 64) - 1)
ARRAYS = st.fixed_dictionaries(
    {
        b"__ndarray__": st.just(True),
        b"data": st.binary(max_size=64) | SMALL,
        b"dtype": st.sampled_from(["|u1", "<f8", "<f4", ">i2", "|b1", "|O", "<U4", "<c8", "<f2"]) | st.text(max_size=4),
        b"shape": st.lists(st.integers(-2, 1 << 40) | st.integers(0, 4), max_size=9) | st.none(),
    }
)
NUMBERS = st.fixed_dictionaries(
    {b"__npgeneric__": st.just(True), b"data": st.binary(max_size=8) | st.floats(), b"dtype": st.just("<f8")}
)
LEAVES = st.none() | st.booleans() | SMALL | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
VALUES = st.recursive(
    LEAVES | ARRAYS | NUMBERS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=4
)
REQUESTS = st.dictionaries(KEYS, VALUES, max_size=5)


def taken(data: bytes) -> bool:
    """Whether ``data`` is a request that the policy could decide on; anything but a ContractError otherwise fails."""
    try:
        seen = fitted(LiberoLayout(SPEC)(openpi.unpack(data)), SPEC).checked(SPEC)
    except ContractError as error:
        assert str(error).endswith(".") and len(str(error)) < 1000
        return False
    assert seen.images["audit"].shape == (4, 4, 3) and seen.state.dtype == np.float32
    return True


@given(st.binary(max_size=400))
@repeatably
def test_bytes_that_are_no_message_are_refused(data):
    assert not taken(data)


@given(REQUESTS)
@settings(repeatably, max_examples=12)
def test_messages_of_anything_are_refused(request_):
    taken(packed(request_))


@given(st.data())
@repeatably
def test_a_request_of_which_bytes_are_changed_is_taken_or_refused(data):
    message = bytearray(packed(asked()))
    for _ in range(data.draw(st.integers(1, 6))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    taken(bytes(message[: data.draw(st.integers(0, len(message)))]))


PICTURES = st.tuples(st.sampled_from(["|u1", "<f4", "<i8"]), st.lists(st.integers(0, 40), min_size=1, max_size=4))


@given(PICTURES, st.integers(0, 255))
@repeatably
def test_pictures_of_any_shape_are_fitted_or_refused(kind, value):
    dtype, shape = kind
    with np.errstate(all="raise"):
        found = taken(packed(asked(observation_image=np.full(shape, value, dtype))))
    rgb = len(shape) == 3 and min(shape) > 0 and dtype != "<i8" and 3 in (shape[0], shape[2])
    assert found == rgb


@given(st.sampled_from(["<f8", "<f4"]), st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -3.0]))
@repeatably
def test_pictures_of_any_numbers_are_fitted_or_refused(dtype, number):
    with np.errstate(all="raise"):
        assert taken(packed(asked(observation_image=np.full((4, 4, 3), number, dtype)))) == (abs(number) < 1)


# -- at a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[OpenpiServer, OpenpiStyle]]:
    """A server, and a client that is connected all the time."""
    limits = replace(PATIENT, message_bytes=20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(websocket, "_LINGER", 0.05)
        with serving_openpi(echo_policy(), limits) as server, OpenpiStyle(server.url) as client:
            yield server, client


FRAMES = st.builds(
    frame, st.integers(0, 15), st.binary(max_size=200), st.booleans(), st.none() | st.sampled_from([9, 300, 1 << 40])
)
ACTS = st.lists(FRAMES | st.binary(max_size=60) | REQUESTS.map(lambda one: frame(2, packed(one))), max_size=6)


@given(st.sampled_from([b"", OPENING, OPENING + b"\r\n", b"\x16\x03\x01"]), ACTS)
@settings(repeatably, max_examples=20)
def test_whatever_a_client_sends_the_others_are_answered(served, opening, acts):
    server, client = served
    with socket.create_connection(server.server_address, timeout=PATIENCE) as hostile:
        with suppress(ConnectionError):
            for act in (opening, *acts):
                hostile.sendall(act)
        assert client.infer(asked(seed=6))["actions"][0, 1] == 6
        answer = _until_it_says_nothing(hostile)
    assert b"Traceback" not in answer


def _until_it_says_nothing(sock: socket.socket) -> bytes:
    """What the server says to somebody who sends nothing more."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(4096), b""))
    return b""


def test_a_large_message_that_never_comes_takes_no_memory(served):
    """What is announced is not what is kept: a frame's size is checked before its first byte."""
    server, client = served
    held: list[Any] = []
    for _ in range(20):
        held.append(socket.create_connection(server.server_address, timeout=PATIENCE))
        held[-1].sendall(OPENING + b"\r\n")
        assert held[-1].recv(12) == b"HTTP/1.1 101"
        held[-1].sendall(frame(2, b"x" * 100, announced=1 << 40))
    answers = [_until_it_says_nothing(sock) for sock in held]
    assert all(b"\x03\xf1" in answer for answer in answers), "1009"
    assert client.infer(asked(seed=6))["actions"][0, 1] == 6
    for sock in held:
        sock.close()
