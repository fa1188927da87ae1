"""Messages arrive as they were sent, and anything else is refused."""

from __future__ import annotations

import io
import os
import pickle
import struct
import threading

import msgpack
import numpy as np
import pytest

from vla_rl.contract import CONTRACT_VERSION, wire
from vla_rl.contract.errors import ContractError
from vla_rl.contract.wire import CutShortError, handshake, is_loopback, pack, read_message, unpack, write_message

LOOP: list[object] = []
LOOP.append(LOOP)


def array_message(dtype, shape, data):
    """A message that holds only an array, with a head that may lie."""
    head = msgpack.packb([dtype, shape])
    return msgpack.packb(msgpack.ExtType(1, struct.pack("<H", len(head)) + head + data))


@pytest.mark.parametrize("dtype", wire._DTYPES)
def test_arrays_come_back_equal_writable_and_their_own(dtype):
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 4)):
        array = np.asarray(np.arange(np.prod(shape)).reshape(shape) * 37 % 11).astype(dtype)
        back = unpack(pack(array))
        assert back.dtype == array.dtype and back.shape == shape and np.array_equal(back, array)
        assert back.flags.writeable and back.flags.c_contiguous and back.dtype.isnative


def test_layout_and_byte_order_do_not_matter():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for same in (np.asfortranarray(array), array[::-1][::-1], array.astype(">f4"), array.astype("<f4")):
        assert pack(same) == pack(array)
    assert np.array_equal(unpack(pack(array[:, ::2, 1:])), array[:, ::2, 1:])
    assert b"\x00\x00\x80\x3f" in pack(np.float32([1.0]))  # little-endian whatever this machine is


def test_nested_messages_come_back():
    message = {
        "rollout": {"features": {"a": np.ones((2, 1), np.uint8)}, "info": {"env_s": 0.25, "steps": 12}},
        "list": [1, -(2**63), 2**64 - 1, 1.5, float("inf"), True, None, "grüße", b"\x00\xff", [], {}],
        "tuple": (1, 2),
        "numpy": [np.float64(0.5), np.int32(7), np.bool_(True)],
    }
    back = unpack(pack(message))
    assert np.array_equal(back["rollout"]["features"]["a"], np.ones((2, 1), np.uint8))
    assert back["rollout"]["info"] == message["rollout"]["info"] and back["list"] == message["list"]
    assert back["tuple"] == [1, 2] and back["numpy"] == [0.5, 7, True]
    assert [type(item) for item in back["numpy"]] == [float, int, bool]
    assert np.isnan(unpack(pack(float("nan"))))
    back = unpack(array_message("bool", [3], b"\x00\x01\x07"))
    assert back.view(np.uint8).tolist() == [0, 1, 1], "booleans are zero or one whatever was sent"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the message is a object"),
        ({"a": [1, {2: 3}]}, r"the message\['a'\]\[1\] has a key that is not text"),
        ({"a": {"b": 1 + 2j}}, r"the message\['a'\]\['b'\] is a complex"),
        ([np.array([object()])], r"the message\[0\] has dtype object"),
        (np.array(["text"]), "dtype <U4"),
        (np.zeros(2, [("x", "f4")]), "dtype"),
        (np.array(["2020-01-01"], "datetime64[s]"), "dtype datetime64"),
        (np.zeros(1, np.complex64), "dtype complex64"),
        ({1, 2}, "is a set"),
        (2**64, "cannot be written"),
        ("\ud800", "cannot be written"),
        (LOOP, "cannot be written"),
    ],
)
def test_what_could_not_come_back_is_not_sent(value, message):
    with pytest.raises(ContractError, match=message):
        pack(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        b"\x01\x02",
        b"\x91" * 5000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xa2\xff\xff",
        pickle.dumps({"a": 1}),
        msgpack.packb({1: 2}),
        msgpack.packb({b"a": 2}),
        msgpack.packb(msgpack.ExtType(2, b"x")),
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.ExtType(1, b"\xff\xff\x00")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({"a": [msgpack.Timestamp(1)]}),
        array_message("float32", [2], b"\0" * 7),
        array_message("float32", [2], b"\0" * 12),
        array_message("float32", [-1, -2], b"\0" * 8),
        array_message("float32", [2**40, 2**40], b""),
        array_message("float32", [0] * 100, b""),
        array_message("float32", [True], b"\0" * 4),
        array_message("float32", 2, b"\0" * 8),
        array_message("object", [1], b"\0" * 8),
        array_message("O", [1], b"\0" * 8),
        array_message("<f4", [2], b"\0" * 8),
        array_message(["float32"], [2], b"\0" * 8),
        array_message({"a": 1}, None, b""),
        msgpack.packb(msgpack.ExtType(1, struct.pack("<H", 1) + b"\xc0")),
    ],
)
def test_malformed_bytes_are_refused_in_one_sentence(data):
    with pytest.raises(ContractError) as caught:
        unpack(data)
    assert "\n" not in str(caught.value) and "so it is dropped" in str(caught.value)


def test_random_damage_never_escapes_as_another_error():
    good = pack({"a": np.arange(5.0), "b": [1, "text", {"c": None}], "d": np.zeros((2, 2), bool)})
    rng, refused = np.random.default_rng(0), 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        try:
            unpack(bytes(data[: rng.integers(len(data) + 1)]))
        except ContractError:
            refused += 1
    assert refused > 1000


def sent(*values):
    stream = io.BytesIO()
    for value in values:
        write_message(stream, value)
    return stream.getvalue()


def test_messages_follow_each_other_until_the_stream_ends():
    stream = io.BytesIO(sent({"a": 1}, np.arange(3), None))
    assert read_message(stream) == {"a": 1} and read_message(stream).tolist() == [0, 1, 2]
    assert read_message(stream) is None
    with pytest.raises(EOFError):
        read_message(stream)


@pytest.mark.parametrize("cut", [1, 4, 5, 11, 12, 13, -1])
def test_a_message_cut_short_or_of_something_else_is_no_message(cut):
    with pytest.raises(CutShortError, match=r"ended after .* bytes of a message"):
        read_message(io.BytesIO(sent({"a": "hello"})[:cut]))
    for text in (b"Traceback (most recent call last)", b"Tr"):
        with pytest.raises(ContractError, match=r"holds b'Tr"):
            read_message(io.BytesIO(text))


def test_sizes_are_checked_before_anything_is_read(monkeypatch):
    class Endless:
        asked = 0

        def read(self, size):
            self.asked += size
            return (wire.MAGIC + struct.pack("<Q", 1 << 60))[:size]

    stream = Endless()
    with pytest.raises(ContractError, match="announces 1152921504606846976 bytes"):
        read_message(stream)
    assert stream.asked == 12
    with pytest.raises(ContractError, match="more than 5, so it is refused"):
        read_message(io.BytesIO(sent("hello")), max_bytes=5)
    monkeypatch.setattr(wire, "_MAX_BYTES", 5)
    stream = io.BytesIO()
    with pytest.raises(ContractError, match="not sent"):
        write_message(stream, "hello")
    assert stream.getvalue() == b""


def test_big_messages_pass_a_pipe_in_pieces():
    big = {"a": np.random.default_rng(0).integers(0, 256, 5_000_000, np.uint8)}
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb") as writer:
        thread = threading.Thread(target=write_message, args=(writer, big))
        thread.start()
        back = read_message(reader)
        thread.join()
    assert np.array_equal(back["a"], big["a"])


def test_a_handshake_names_the_other_side():
    answer = sent({"contract_version": CONTRACT_VERSION, "name": "actor"})
    mine = io.BytesIO()
    assert handshake(io.BytesIO(answer), mine, "learner") == "actor"
    assert handshake(io.BytesIO(mine.getvalue()), io.BytesIO(), "actor") == "learner"


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        ({"contract_version": CONTRACT_VERSION + 1, "name": "robot 7"}, "'robot 7' speaks contract version 3 but 'me'"),
        ({"name": "actor"}, "got no vla-rl greeting"),
        ({"contract_version": "1"}, "got no vla-rl greeting"),
        ([1], "got no vla-rl greeting"),
        ({"contract_version": CONTRACT_VERSION, "name": "x" * 70_000}, "refused"),
    ],
)
def test_other_versions_and_strangers_are_refused(greeting, message):
    with pytest.raises(ContractError, match=message):
        handshake(io.BytesIO(sent(greeting)), io.BytesIO(), "me")


def test_this_machine_is_known_by_its_address():
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"]))
    others = ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example", "localhost.example.org", ""]
    assert not any(map(is_loopback, others))
