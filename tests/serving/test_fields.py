"""Every field of every message with every wrong value, through a socket: an error of one sentence, and no traceback."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgpack
import numpy as np
import pytest
import websockets.sync.server
from PIL import Image

from sims.toy import counting
from tests.patience import PATIENCE
from tests.serving.openpi_style import OpenpiStyle, asked, packed
from tests.serving.served import PATIENT, Benchmark, NoisyPolicy, counted, echo_policy, serving, serving_openpi
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.serving import arrays, vla_eval, websocket
from vla_rl.serving.openpi import OpenpiClient
from vla_rl.serving.vla_eval import Kind, Message
from vla_rl.serving.websocket import DisconnectedError, connect


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


SHAPE = counting.spec().images["audit"].shape
ARRAY = {"__ndarray__": True, "dtype": "<f4", "shape": [4], "data": b"\0" * 16}
WRONG: dict[str, Any] = {
    "nothing": None,
    "a bool": True,
    "a negative": -7,
    "a huge number": (1 << 64) - 1,
    "nan": float("nan"),
    "text": "wrong",
    "a long text": "x" * 100_000,
    "bytes": b"\xff\xfe",
    "a list": [1, "a", None],
    "deep": nested(400),
    "a map": {"x": 1},
    "bytes as keys": {b"x": 1, "y": 2},
    "an array": ARRAY,
    "16 bits": {"__ndarray__": True, "dtype": "<u2", "shape": list(SHAPE), "data": b"\x2c\x01" * 48},
    "objects": {**ARRAY, "dtype": "|O"},
    "a negative shape": {**ARRAY, "shape": [-4]},
    "a shape beyond all numbers": {**ARRAY, "shape": [1 << 63, 0], "data": b""},
    "an array as a shape": {**ARRAY, "shape": ARRAY},
    "a huge picture": {"__image__": True, "format": "png", "shape": [4097, 4096, 1], "data": png(4097, 4096)},
    "an extension": msgpack.ExtType(5, b"\0" * 3),
}


def for_openpi(value: Any) -> Any:
    """``value`` with the keys that openpi's arrays have."""
    if isinstance(value, dict) and "__ndarray__" in value:
        return {key.encode(): for_openpi(item) for key, item in value.items()}
    return value


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


def framed(kind: str = "observation", payload: Any = None, **changes: Any) -> bytes:
    fields = {"type": kind, "payload": {} if payload is None else payload, "seq": 1, "timestamp": 0.0, **changes}
    return msgpack.packb(fields, default=lambda array: {**ARRAY, **_described(array)})


def _described(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def messages(value: Any) -> Iterator[tuple[str, bytes, bool]]:
    """(field, message, whether it may be read) of every field with ``value`` in its place."""
    task = isinstance(value, dict) and not {"__ndarray__", "__image__"} & value.keys()
    for field in ("type", "payload", "seq", "timestamp"):
        number = (field == "timestamp" and type(value) in (int, float)) or (field == "payload" and task)
        yield field, framed(**{"payload": counted(), field if field != "type" else "kind": value}), number
    yield "protocol_version", framed("hello", {"protocol_version": value}), False
    yield "task", framed("episode_start", {"task": value}), task
    seen = counted()
    for field in ("images", "states", "task_description"):
        yield field, framed(payload={**seen, field: value}), value == ARRAY and field == "states"
    yield "audit", framed(payload={**seen, "images": {"audit": value}}), False
    yield "data", framed(payload={**seen, "states": {**ARRAY, "data": value}}), False


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_field_of_the_harness_is_an_error_and_nobody_else_is_disturbed(wrong, unhandled):
    with serving(echo_policy()) as server, Benchmark(server.url) as good:
        good.start()
        for field, data, readable in messages(WRONG[wrong]):
            with closing(connect(server.url, PATIENT)) as bad:
                bad.send(framed("episode_start", {"task": {}}))
                bad.send(data)
                if not readable:
                    answer = vla_eval.unpack(bad.receive(PATIENCE))
                    assert answer.kind is Kind.ERROR, (field, answer)
                    one_sentence(answer.payload["error"])
        assert good.act(counted(seed=6)).tolist() == [0, 6]
    assert not unhandled


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_field_of_a_request_is_a_text_and_nobody_else_is_disturbed(wrong, unhandled):
    value = for_openpi(WRONG[wrong])
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as good:
        for field in ("observation/image", "observation/state", "prompt"):
            if field != "observation/state" or WRONG[wrong] is not ARRAY:
                with OpenpiStyle(server.url) as bad:
                    one_sentence(bad.complaint(packed({**asked(), field: value})))
        assert good.infer(asked(seed=6))["actions"][0, 1] == 6
    assert not unhandled


@pytest.mark.parametrize("wrong", WRONG)
def test_a_server_that_answers_nonsense_is_one_sentence(wrong):
    value = WRONG[wrong]
    answers = [packed({"actions": for_openpi(value)})] if value is not ARRAY else []
    answers += [packed(for_openpi(value))]

    def answer(socket: Any) -> None:
        for one in (packed({}), *answers):
            socket.send(one)
        socket.recv(PATIENCE)

    with websockets.sync.server.serve(answer, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.socket.getsockname()[1]
        with closing(OpenpiClient(f"ws://127.0.0.1:{port}", PATIENCE, PATIENT)) as client:
            for _ in answers:
                with pytest.raises(UserError) as refused:
                    client._ask({})
                one_sentence(str(refused.value))
        server.shutdown()
        thread.join(PATIENCE)


# -- sizes and ranges --------------------------------------------------------------------------------------------------


def read(**image: Any) -> np.ndarray:
    return vla_eval.unpack(framed(payload={"x": {"__image__": True, "format": "png", **image}})).payload["x"]


def test_a_small_picture_file_is_decoded_up_to_a_size():
    assert len(png(4097, 4096)) < 50_000
    assert read(shape=[4096, 4096, 1], data=png(4096, 4096)).nbytes == 1 << 24
    with pytest.raises(ContractError, match="image that cannot be read"):
        read(shape=[4097, 4096, 1], data=png(4097, 4096))


def test_many_small_picture_files_together_are_decoded_up_to_a_size(monkeypatch):
    monkeypatch.setattr(arrays, "_MAX_ARRAYS", 3 << 20)
    image = {"__image__": True, "format": "png", "shape": [1024, 1024, 1], "data": png(1024, 1024)}
    assert len(vla_eval.unpack(framed(payload={"x": [image] * 3})).payload["x"]) == 3
    with pytest.raises(ContractError, match="arrays of more than"):
        vla_eval.unpack(framed(payload={"x": [image] * 4}))


@pytest.mark.parametrize("number", [255.0, -1.0, 1.6])
def test_floats_that_are_no_brightness_are_refused(number):
    with serving_openpi(echo_policy()) as server, OpenpiStyle(server.url) as client:
        assert "send 0 to 1" in client.complaint(packed(asked(observation_image=np.full((4, 4, 3), number))))


def test_what_a_request_draws_depends_on_its_pictures():
    policy = NoisyPolicy(counting.spec(), "noise")
    with serving_openpi(policy) as server, OpenpiStyle(server.url) as client:
        drawn = [
            client.infer(asked(observation_image=np.full(SHAPE, shade, np.uint8)))["actions"] for shade in (1, 2, 1)
        ]
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])


def test_a_refusal_ends_only_what_cannot_go_on():
    """An observation that does not fit is answered under its number; a message that is none ends the connection."""
    with serving(echo_policy()) as server, closing(connect(server.url, PATIENT)) as bad:
        bad.send(framed("episode_start", {"task": {}}))
        bad.send(framed(payload=counted(images={"audit": np.full(SHAPE, 300, np.uint16)}), seq=9))
        answer = vla_eval.unpack(bad.receive(PATIENCE))
        assert (answer.kind, answer.seq) == (Kind.ERROR, 9) and "dtype uint16" in answer.payload["error"]
        bad.send(vla_eval.pack(Message(Kind.HELLO, {"protocol_version": 2}, 1)))
        assert vla_eval.unpack(bad.receive(PATIENCE)).seq == 0
        with pytest.raises(DisconnectedError):
            bad.receive(PATIENCE)
