"""What hostile or broken programs send: refused in one sentence, in bounded memory, and the server goes on."""

from __future__ import annotations

import os
import random
import socket
import tracemalloc

import grpc
import msgpack
import pytest

from tests.fleet.fleets import Hand, hello, spool_of
from tests.fleet.fuzz import decoders, fuzz
from tests.patience import wait_until
from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.protocol import (
    MAX_MESSAGE,
    MAX_RECORDS,
    read_from_robot,
    read_from_server,
    write_records,
)

Code = grpc.StatusCode


def delimited(number: int, data: bytes) -> bytes:
    size, head = len(data), bytes([number << 3 | 2])
    while size >= 0x80:
        head, size = head + bytes([size & 0x7F | 0x80]), size >> 7
    return head + bytes([size]) + data


BROKEN = {
    "nothing": b"",
    "noise": b"\xff" * 100,
    "a field of another version alone": delimited(15, b"x"),
    "half a message": write_records(spool_of(2).records)[:-3],
    "a length beyond the end": b"\x12\xff\xff\xff\x7f",
    "a number without an end": b"\x08" + b"\xff" * 20,
    "records without one": delimited(2, b""),
    "a second Hello": pb.FromRobot(hello=pb.Hello(protocol=1)).SerializeToString(),
    "text that is not UTF-8": delimited(2, delimited(1, delimited(3, b"\xff\xfe"))),
    "two messages in one": write_records(spool_of(1).records) + write_records(spool_of(1).records),
    "a million records": delimited(2, b"\x0a\x00" * 1_000_000),
    "a million messages of none": b"\x12\x00" * 1_000_000,
    "a kind that there is not": delimited(2, delimited(1, b"\x10\x63")),
}


def test_what_is_no_message_ends_its_connection_alone(serve, store, caplog):
    server, other = serve(), spool_of(2 * len(BROKEN), robot="arm-2")
    with Hand(server.port) as good:
        good.greet(other)
        for number, message in enumerate(BROKEN.values()):
            with Hand(server.port) as bad:
                bad.greet(spool_of(1))
                bad.send(message)
                code, sentence = bad.ending()
            assert code is Code.INVALID_ARGUMENT and sentence.endswith(".") and "\n" not in sentence
            assert sentence in caplog.text
            good.send(write_records(other.records[2 * number : 2 * number + 2]))
            assert good.next("ack").durable_seq == 2 * number + 1
    assert store.records == other.records


def test_what_is_no_hello_is_refused(serve):
    port = serve().port
    for message in BROKEN.values():
        with Hand(port) as hand:
            hand.send(message)
            assert hand.ending()[0] in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)


def test_a_message_that_is_too_large_is_refused_before_it_is_read(serve, store):
    server = serve()
    # gRPC's own limit of what is sent would stop an honest robot; this one has none.
    huge = grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.max_send_message_length", -1)])
    with huge, pytest.raises(grpc.RpcError) as caught:
        list(huge.stream_stream("/vla_rl.fleet.Fleet/Stream")(iter([bytes(MAX_MESSAGE + 1)])))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED and not store.records
    with pytest.raises(ContractError, match="is larger than"):
        read_from_robot(bytes(MAX_MESSAGE + 1))


def test_a_compressed_bomb_is_refused(serve, store):
    server, spool = serve(), spool_of(1, payload=bytes(4 << 20))
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options, compression=grpc.Compression.Gzip) as channel:
        call = channel.stream_stream("/vla_rl.fleet.Fleet/Stream")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([hello(spool).SerializeToString(), write_records(spool.records)])))
    assert caught.value.code() in (Code.UNIMPLEMENTED, Code.INTERNAL) and not store.records


def test_fields_are_counted_before_they_become_objects():
    bomb = delimited(2, b"\x0a\x00" * 2_000_000)
    tracemalloc.start()
    with pytest.raises(ContractError, match=f"more than {MAX_RECORDS} records"):
        read_from_robot(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_bytes_that_are_no_protocol_at_all_do_not_end_the_server(serve):
    server = serve()
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01" + bytes(500)):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(data)
    with Hand(server.port) as hand:
        hand.greet(spool_of(1))


def test_replayed_and_reordered_messages_change_nothing(serve, store):
    spool = spool_of(12)
    pieces = [write_records(spool.records[start : start + 3]) for start in range(0, 12, 3)]
    draw = random.Random(0)
    with Hand(serve().port) as hand:
        hand.greet(spool)
        for piece in [*pieces[:2], *draw.choices(pieces, k=40), *pieces]:
            hand.send(piece)
        wait_until(lambda: store.durable(spool.robot, spool.epoch) == 11)
    assert store.records == spool.records


def test_everything_that_reads_foreign_bytes_reads_or_refuses_them():
    found = fuzz(3000)
    assert found.wrong == [] and found.changed >= 1500
    assert min(found.read[name] for name in decoders()) >= 5 and found.refused.total() > 1500
    assert found.growth_mb < 64


@pytest.mark.parametrize("key", [b"k" * 5000, 1 << 60])
def test_a_refusal_is_short_whatever_it_is_of(key):
    with pytest.raises(ContractError) as caught:
        wire.unpack(msgpack.packb({key: 1}))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [b"", b"\xff" * 9, delimited(15, b"x")])
def test_a_robot_refuses_what_no_server_says(data):
    with pytest.raises(ContractError, match="so it is refused"):
        read_from_server(data)
