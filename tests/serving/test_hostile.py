"""Whatever comes in, of every field and as any bytes: an answer or one sentence, and everybody else is answered."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from sims.toy import counting
from tests.patience import PATIENCE
from tests.serving.openpi_style import OpenpiStyle, asked, packed
from tests.serving.served import PATIENT, Benchmark, NoisyPolicy, counted, echo_policy, serving, serving_openpi
from tests.serving.test_messages import framed
from tests.serving.test_remote import listening
from tests.serving.test_websocket import OPENING, frame
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.serving import arrays, openpi, vla_eval, websocket
from vla_rl.serving.openpi import LiberoLayout, OpenpiClient, OpenpiServer, fitted
from vla_rl.serving.vla_eval import Kind, Message
from vla_rl.serving.websocket import DisconnectedError, connect

SPEC = counting.spec()
SHAPE = SPEC.images["audit"].shape


@pytest.fixture(autouse=True, scope="module")
def _at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(websocket, "_LINGER", 0.02)
        yield


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ended a thread or a connection by a traceback."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *args: found.append(args))
    return found


def one_sentence(said: str) -> None:
    assert said.endswith(".") and len(said) < 1000 and "Traceback" not in said and "policy failed" not in said, said


# -- every field with every wrong value --------------------------------------------------------------------------------


def png(height: int, width: int) -> bytes:
    """A black picture of any size in a few bytes."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ARRAY = {"__ndarray__": True, "dtype": "<f4", "shape": [4], "data": b"\0" * 16}
WRONG: dict[str, Any] = {
    "nothing": None,
    "a bool": True,
    "a negative": -7,
    "a huge number": (1 << 64) - 1,
    "nan": float("nan"),
    "a long text": "x" * 100_000,
    "bytes": b"\xff\xfe",
    "a list": [1, "a", None],
    "deep": nested(400),
    "a map": {"x": 1},
    "bytes as keys": {b"x": 1, "y": 2},
    "an array": ARRAY,
    "16 bits": {"__ndarray__": True, "dtype": "<u2", "shape": list(SHAPE), "data": b"\x2c\x01" * 48},
    "a shape beyond all numbers": {**ARRAY, "shape": [1 << 63, 0], "data": b""},
    "a huge picture": {"__image__": True, "format": "png", "shape": [4097, 4096, 1], "data": png(4097, 4096)},
    "an extension": msgpack.ExtType(5, b"\0" * 3),
}


def for_openpi(value: Any) -> Any:
    """``value`` with the keys that openpi's arrays have."""
    if isinstance(value, dict) and "__ndarray__" in value:
        return {key.encode(): item for key, item in value.items()}
    return value


def plain(payload: Any) -> Any:
    """``payload`` with its arrays as the harness writes them."""
    if isinstance(payload, np.ndarray):
        data = {"dtype": payload.dtype.str, "shape": list(payload.shape), "data": payload.tobytes()}
        return {"__ndarray__": True, **data}
    return {name: plain(item) for name, item in payload.items()} if isinstance(payload, dict) else payload


def messages(value: Any) -> Iterator[tuple[str, bytes, bool]]:
    """(field, message, whether it may be read) of every field with ``value`` in its place."""
    seen, task = plain(counted()), isinstance(value, dict) and not {"__ndarray__", "__image__"} & value.keys()
    for field in ("type", "payload", "seq", "timestamp"):
        number = (field == "timestamp" and type(value) in (int, float)) or (field == "payload" and task)
        fields = {"type": "observation", "payload": seen, "seq": 1, "timestamp": 0.0, field: value}
        yield field, msgpack.packb(fields), number
    yield "protocol_version", framed({"protocol_version": value}, type="hello"), False
    yield "task", framed({"task": value}, type="episode_start"), task
    for field in ("images", "states", "task_description"):
        yield field, framed({**seen, field: value}), value == ARRAY and field == "states"
    yield "audit", framed({**seen, "images": {"audit": value}}), False
    yield "data", framed({**seen, "states": {**ARRAY, "data": value}}), False


def test_a_wrong_field_of_the_harness_disturbs_nobody_else(unhandled):
    with serving(echo_policy()) as server, Benchmark(server.url) as good:
        good.start()
        for step, value in enumerate(WRONG.values()):
            for field, data, readable in messages(value):
                with closing(connect(server.url, PATIENT)) as bad:
                    bad.send(framed({"task": {}}, type="episode_start"))
                    bad.send(data)
                    if not readable:
                        answer = vla_eval.unpack(bad.receive(PATIENCE))
                        assert answer.kind is Kind.ERROR, (field, answer)
                        one_sentence(answer.payload["error"])
            assert good.act(counted(seed=6)).tolist() == [step, 6]
    assert not unhandled


def test_a_wrong_field_of_a_request_is_a_text_and_disturbs_nobody(unhandled):
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as good:
        for value in WRONG.values():
            for field in ("observation/image", "observation/state", "prompt"):
                if field != "observation/state" or value is not ARRAY:
                    with OpenpiStyle(server.url) as bad:
                        one_sentence(bad.complaint(packed({**asked(), field: for_openpi(value)})))
            assert good.infer(asked(seed=6))["actions"][0, 1] == 6
    assert not unhandled


def test_a_server_that_answers_nonsense_is_one_sentence():
    values = [for_openpi(value) for value in WRONG.values() if value is not ARRAY]
    answers = [packed(message) for value in values for message in (value, {"actions": value})]

    def answer(connection: Any) -> None:
        for one in (packed({}), *answers):
            connection.send(one)
        for _ in connection:
            pass

    with listening(answer) as host, closing(OpenpiClient(f"ws://{host}", PATIENCE, PATIENT)) as client:
        for _ in answers:
            with pytest.raises(UserError) as refused:
                client._ask({})
            one_sentence(str(refused.value))


# -- sizes and ranges --------------------------------------------------------------------------------------------------


def test_small_picture_files_are_decoded_up_to_a_size_alone_and_together(monkeypatch):
    def read(count: int, height: int, width: int) -> Any:
        image = {"__image__": True, "format": "png", "shape": [height, width, 1], "data": png(height, width)}
        return vla_eval.unpack(framed({"x": [image] * count})).payload["x"]

    assert len(png(4097, 4096)) < 50_000 and read(1, 4096, 4096)[0].nbytes == 1 << 24
    with pytest.raises(ContractError, match="image that cannot be read"):
        read(1, 4097, 4096)
    monkeypatch.setattr(arrays, "_MAX_ARRAYS", 3 << 20)
    assert len(read(3, 1024, 1024)) == 3
    with pytest.raises(ContractError, match="arrays of more than"):
        read(4, 1024, 1024)


def test_what_a_request_draws_depends_on_its_pictures():
    policy = NoisyPolicy(SPEC, "noise")
    with serving_openpi(policy) as server, OpenpiStyle(server.url) as client:
        drawn = [
            client.infer(asked(observation_image=np.full(SHAPE, shade, np.uint8)))["actions"] for shade in (1, 2, 1)
        ]
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])


def test_a_refusal_ends_only_what_cannot_go_on():
    """An observation that does not fit is answered under its number; a message that is none ends the connection."""
    with serving(echo_policy()) as server, closing(connect(server.url, PATIENT)) as bad:
        bad.send(framed({"task": {}}, type="episode_start"))
        bad.send(framed(plain(counted(images={"audit": np.full(SHAPE, 300, np.uint16)})), seq=9))
        answer = vla_eval.unpack(bad.receive(PATIENCE))
        assert (answer.kind, answer.seq) == (Kind.ERROR, 9) and "dtype uint16" in answer.payload["error"]
        bad.send(vla_eval.pack(Message(Kind.HELLO, {"protocol_version": 2}, 1)))
        assert vla_eval.unpack(bad.receive(PATIENCE)).seq == 0
        with pytest.raises(DisconnectedError):
            bad.receive(PATIENCE)


# -- any bytes ---------------------------------------------------------------------------------------------------------

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
        one_sentence(str(error))
        return False
    assert seen.images["audit"].shape == (4, 4, 3) and seen.state.dtype == np.float32
    return True


@given(st.binary(max_size=400))
@repeatably
def test_bytes_that_are_no_message_are_refused(data):
    assert not taken(data)


@given(REQUESTS)
@settings(repeatably, max_examples=8)
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


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30, -3.0, 255.0, -1.0, 1.6, 0.5])
def test_floats_that_are_no_brightness_are_refused(number):
    for dtype in ("<f8", "<f4"):
        with np.errstate(all="raise"):
            assert taken(packed(asked(observation_image=np.full((4, 4, 3), number, dtype)))) == (number == 0.5)


# -- at a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[OpenpiServer, OpenpiStyle]]:
    """A server, and a client that is connected all the time."""
    limits = replace(PATIENT, message_bytes=20_000)
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
    for _ in range(20):
        with socket.create_connection(server.server_address, timeout=PATIENCE) as sock:
            sock.sendall(OPENING + b"\r\n")
            assert sock.recv(12) == b"HTTP/1.1 101"
            sock.sendall(frame(2, b"x" * 100, announced=1 << 40))
            assert b"\x03\xf1" in _until_it_says_nothing(sock), "1009"
    assert client.infer(asked(seed=6))["actions"][0, 1] == 6
