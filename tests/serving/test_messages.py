"""Messages of both protocols: what the formats allow is read, and everything else is refused in one sentence."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from sims.toy.counting import spec as counting_spec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.serving import openpi, vla_eval
from vla_rl.serving.observation import SingleObservation, batch_of, chunk_of
from vla_rl.serving.vla_eval import Kind, Message

PICTURE = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
ARRAYS = [
    np.array([True, False]),
    np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
    np.array([[-1.5, np.inf, np.nan]], np.float32),
    np.array(3.25),
    np.zeros((0, 4), np.int64),
    np.arange(3, dtype=np.float16),
    np.arange(4, dtype=">i4"),
]


def of_openpi(item: Any) -> Any:
    return openpi.unpack(openpi.pack({"item": item}))["item"]


def of_vla_eval(item: Any) -> Any:
    return vla_eval.unpack(vla_eval.pack(Message(Kind.OBSERVATION, {"item": item}, 7))).payload["item"]


@pytest.mark.parametrize("through", [of_openpi, of_vla_eval])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.str)
def test_arrays_come_back_equal_writable_and_in_native_order(through, array):
    back = through(array)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("=") and back.dtype.isnative and back.flags.writeable


@pytest.mark.parametrize("through", [of_openpi, of_vla_eval])
def test_plain_values_come_back(through):
    values = {"a": [1, -2, 0.5, None, True, "ü"], "deep": {"b": []}}
    assert through(values) == values
    assert through(np.float32(0.25)) == 0.25 and through(np.int64(3)) == 3


@pytest.mark.parametrize("through", [of_openpi, of_vla_eval])
@pytest.mark.parametrize("wrong", [np.array([{}]), np.array(["text"]), np.zeros(2, complex), np.zeros(1, "f4,i4"), {1}])
def test_what_no_format_holds_is_not_sent(through, wrong):
    with pytest.raises(ContractError, match="is not sent"):
        through(wrong)


# -- hostile arrays ----------------------------------------------------------------------------------------------------


def as_openpi(**array: Any) -> None:
    openpi.unpack(msgpack.packb({"x": {b"__ndarray__": True, **{name.encode(): item for name, item in array.items()}}}))


def as_vla_eval(**array: Any) -> None:
    vla_eval.unpack(framed({"x": {"__ndarray__": True, **array}}))


def as_raw_image(**array: Any) -> None:
    vla_eval.unpack(framed({"x": {"__image__": True, "format": "raw", **array}}))


def framed(payload: Any, **changes: Any) -> bytes:
    """A message of the harness with some fields changed; those that are None are left out."""
    fields = {"type": "observation", "payload": payload, "seq": 1, "timestamp": 0.0, **changes}
    return msgpack.packb({name: item for name, item in fields.items() if item is not None})


@pytest.mark.parametrize("read", [as_openpi, as_vla_eval, as_raw_image])
@pytest.mark.parametrize(
    ("dtype", "shape", "data", "sentence"),
    [
        ("|O", [1], b"\0" * 8, "an array of dtype '|O', so it is refused"),
        ("<f4,<f4", [1], b"\0" * 8, "an array of dtype"),
        ("<U2", [1], b"\0" * 8, "an array of dtype"),
        ("<c8", [1], b"\0" * 8, "an array of dtype"),
        ("|b4", [2], b"\0" * 8, "an array of dtype"),
        (b"<f4", [2], b"\0" * 8, "an array of dtype"),
        ("<f4", [3], b"\0" * 8, "8 bytes as float32[3], which does not fit"),
        ("<f4", [-2], b"\0" * 8, "an array of shape [-2]"),
        ("<f4", [1 << 62, 0, 1 << 62], b"x", "1 bytes as float32"),
        ("<f4", [1] * 9, b"\0" * 4, "an array of shape"),
        ("<f4", [True, 2], b"\0" * 8, "an array of shape"),
        ("<f4", 2, b"\0" * 8, "an array of shape 2"),
        ("<f4", [2], "12345678", "a str as float32[2], which does not fit"),
    ],
)
def test_an_array_that_is_none_is_refused(read, dtype, shape, data, sentence):
    with pytest.raises(ContractError) as refused:
        read(dtype=dtype, shape=shape, data=data)
    assert sentence in str(refused.value)


def test_bools_are_true_or_false_whatever_their_bytes():
    array = {"__ndarray__": True, "dtype": "|b1", "shape": [3], "data": b"\x00\x02\xff"}
    back = vla_eval.unpack(framed({"x": array})).payload["x"]
    assert back.view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("unpack", [openpi.unpack, vla_eval.unpack])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({"a": 1}) + b"x",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": msgpack.ExtType(4, b"x")}),
        b"\x81\xa1a" * 5000 + b"\x01",
        b"\x81\xa1a\xa1\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_message_are_refused(unpack, data):
    with pytest.raises(ContractError, match="refused"):
        unpack(data)


def test_a_small_message_cannot_ask_for_a_lot_of_memory():
    """A million empty maps in a megabyte would take a hundred."""
    data = b"\x81\xa1a\xdc" + struct.pack(">H", 60_000) + (b"\xdc" + struct.pack(">H", 20) + b"\x80" * 20) * 60_000
    tracemalloc.start()
    with pytest.raises(ContractError, match="more than 200000 entries"):
        openpi.unpack(data)
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


# -- pictures ----------------------------------------------------------------------------------------------------------


def encoded(picture: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format=form)
    return file.getvalue()


def read_picture(data: Any, shape: Any, form: str = "png") -> np.ndarray:
    image = {"__image__": True, "format": form, "data": data, "shape": shape}
    return vla_eval.unpack(framed({"x": image})).payload["x"]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_is_exact(channels):
    picture = np.random.default_rng(0).integers(0, 256, (6, 9, channels), np.uint8)
    data = encoded(picture[:, :, 0] if channels == 1 else picture)
    back = read_picture(data, [6, 9, channels])
    assert np.array_equal(back, picture) and back.flags.writeable


def test_jpeg_is_read():
    smooth = np.tile(np.arange(64, dtype=np.uint8)[:, None, None], (1, 64, 3))
    back = read_picture(encoded(smooth, "JPEG"), [64, 64, 3], "jpeg")
    assert back.shape == smooth.shape and np.abs(back.astype(int) - smooth).max() < 16


def bomb() -> bytes:
    """A PNG of 30,000 x 30,000 pixels in a few bytes, of which only the head is looked at."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (encoded(PICTURE), [5, 7, 4]),
        (encoded(PICTURE), None),
        (encoded(PICTURE)[:-30], [5, 7, 3]),
        (encoded(PICTURE, "BMP"), [5, 7, 3]),
        (bomb(), [30_000, 30_000, 3]),
        (b"", [5, 7, 3]),
        (None, [5, 7, 3]),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused(data, shape):
    with pytest.raises(ContractError, match="an image that cannot be read"):
        read_picture(data, shape)


# -- messages of the harness -------------------------------------------------------------------------------------------


def test_another_version_of_the_protocol_is_refused():
    vla_eval.check_hello({"protocol_version": 1, "harness_version": "9"})
    for other in (0, 2, None, "1"):
        with pytest.raises(ContractError, match="data would be misread; use a vla-eval that speaks version 1"):
            vla_eval.check_hello({"protocol_version": other})


# -- observations and actions ------------------------------------------------------------------------------------------


def counting(**changes: Any) -> SingleObservation:
    spec = counting_spec()
    image = np.zeros(spec.images["audit"].shape, np.uint8)
    fields = {"images": {"audit": image}, "state": np.ones(4, np.float64), "instruction": spec.tasks[1], **changes}
    return SingleObservation(**fields)


def test_an_observation_of_the_harness_is_ours_with_states_or_state():
    seen = counting()
    payload = vla_eval.observation_payload(seen)
    for key in ("states", "state"):
        part = {name: item for name, item in payload.items() if name not in {"states", "state"} - {key}}
        back = vla_eval.read_observation(part).checked(counting_spec())
        assert back.state.dtype == np.float32 and back.state.tolist() == [1, 1, 1, 1]
        assert back.instruction == seen.instruction and list(back.images) == ["audit"]
        batch = batch_of([back], 5, counting_spec())
        assert (batch.task.tolist(), batch.time.tolist()) == ([1], [5]) and batch.state.shape == (1, 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": {}}, "has no camera 'audit'"),
        ({"images": {"audit": np.zeros((5, 4, 3), np.uint8)}}, "camera 'audit' has shape [5, 4, 3]"),
        ({"images": {"audit": np.zeros((4, 4, 3), np.float32)}}, "camera 'audit' has dtype float32"),
        ({"images": {"audit": "x"}}, "camera 'audit' has shape a str"),
        ({"state": np.zeros(5)}, "state has shape [5]"),
        ({"state": np.zeros(4, bool)}, "state has dtype bool"),
        ({"state": np.array([0, np.nan, 0, 0])}, "state is not finite"),
        ({"instruction": "count the odd episodes"}, "did you mean 'count the odd episode'?"),
    ],
)
def test_what_the_policy_would_misread_is_refused(changes, sentence):
    with pytest.raises(ContractError) as refused:
        counting(**changes).checked(counting_spec())
    assert sentence in str(refused.value)


def test_libero_keys_take_the_cameras_in_their_order():
    two = counting(images={"scene": PICTURE, "hand": PICTURE + 1})
    request = openpi.libero_request(two)
    assert list(request) == ["observation/image", "observation/wrist_image", "observation/state", "prompt"]
    assert request["observation/wrist_image"] is two.images["hand"] and request["prompt"] == two.instruction
    for names in ("", "abc"):
        with pytest.raises(UserError, match=r"cameras, but .* add \?layout=module:function"):
            openpi.libero_request(counting(images={name: PICTURE for name in names}))


def test_an_answer_without_actions_is_refused():
    assert chunk_of({"actions": np.array([1.0, 2.0])}, "x").tolist() == [[1.0, 2.0]]
    assert chunk_of({"actions": np.ones((3, 2), np.float64)}, "x").dtype == np.float32
    for wrong in ({}, {"actions": [1.0]}, {"actions": np.zeros((1, 2, 3))}, {"actions": np.zeros((0, 2))}):
        with pytest.raises(ContractError, match="has no actions"):
            chunk_of(wrong, "x")
    with pytest.raises(ContractError, match="not finite"):
        chunk_of({"actions": np.array([1.0, np.nan])}, "x")
