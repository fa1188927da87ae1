"""What both ends of the transport agree on: messages of fleet.proto, names of calls, gRPC's limits, and waits.

What is read from another machine is bounded and checked before anything is made of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.identity import Credentials, check_reach
from vla_rl.fleet.record import MAX_PAYLOAD, FleetRecord

PROTOCOL = 1
MAX_RECORDS = 512  # in one message
MAX_MESSAGE = MAX_PAYLOAD + (64 << 10)  # bytes
_SPARE_FIELDS = 64  # that a newer version may add to a message
_DELIMITED = 2  # protobuf's wire type of bytes, texts and messages
_FIXED = {1: 8, 5: 4}
_VARINT_BYTES = 10
# Fields that a record and its message have in common.
_ALIKE = [one.name for one in fields(FleetRecord) if one.name not in ("robot", "epoch", "kind")]
SERVICE = "vla_rl.fleet.Fleet"
STREAM, MANIFEST, CHUNK = "Stream", "Manifest", "Chunk"
CHUNK_BYTES = 1 << 20  # in one answer
_LIMITS = {
    "grpc.max_receive_message_length": MAX_MESSAGE,
    "grpc.max_send_message_length": MAX_MESSAGE,
    "grpc.max_metadata_size": 8192,
    # Identity alone: a compressed message could become a thousand times its size.
    "grpc.compression_enabled_algorithms_bitset": 1,
    "grpc.so_reuseport": 0,  # a second server on the port fails instead of sharing it
    "grpc.max_concurrent_streams": 8,
    "grpc.max_connection_idle_ms": 60_000,
    "grpc.server_handshake_timeout_ms": 5_000,
    # A connection is made once and belongs to one attempt; what comes after a failure is ours to decide.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_retries": 0,
    "grpc.enable_http_proxy": 0,
}
OPTIONS = tuple(_LIMITS.items())
Message = TypeVar("Message", pb.FromRobot, pb.FromServer)


def read_from_robot(data: bytes) -> pb.FromRobot:
    """The message in ``data``; raises ContractError for one that is too large, broken or empty.

    Fields are counted first: two bytes of an empty record become a hundred once they are parsed.
    """
    if len(data) > MAX_MESSAGE:
        raise _refused(data, f"is larger than {MAX_MESSAGE}")
    for count, _ in enumerate(_outer_fields(data)):
        if count > MAX_RECORDS + _SPARE_FIELDS:
            raise _refused(data, f"holds more than {MAX_RECORDS} records")
    return _parsed(pb.FromRobot, data, "a robot")


def read_from_server(data: bytes) -> pb.FromServer:
    """The message in ``data``; raises ContractError for one that is broken or empty."""
    return _parsed(pb.FromServer, data, "a server")


def _parsed(kind: type[Message], data: bytes, sender: str) -> Message:
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise _refused(data, f"is no message of {sender} ({error})") from error
    if message.WhichOneof("message") is None:
        raise _refused(data, "holds nothing that this version knows")
    return message


def write_records(records: Sequence[FleetRecord]) -> bytes:
    """One message with consecutive ``records`` of one sender."""
    made = pb.Records(records=[_to_message(record) for record in records], last_hash=records[-1].hash)
    return pb.FromRobot(records=made).SerializeToString()


def read_records(robot: str, epoch: str, message: pb.Records) -> list[FleetRecord]:
    """The records of a message from ``robot``, whose spool has this ``epoch``.

    Raises ContractError for a field out of its bounds, for records that do not follow each other, and when their hashes
    are not those of their successors, and the last one's not the announced one.
    """
    records = [_from_message(robot, epoch, record) for record in message.records]
    if not records:
        raise ContractError(f"robot {robot!r} sent no record in a message of records, so it is refused; update it.")
    for before, after in pairwise(records):
        if after.seq != before.last + 1:
            raise ContractError(
                f"robot {robot!r} sent record {after.seq} behind {before.last} in one message, so the message is "
                "refused; look at the program that sends."
            )
    chained = all(after.previous == before.hash for before, after in pairwise(records))
    if not chained or records[-1].hash != message.last_hash:
        raise ContractError(
            f"robot {robot!r} sent records up to {records[-1].last} that are not the ones it announced, so they are "
            "refused; look for a robot that calls itself otherwise than its certificate, or for broken memory."
        )
    return records


def check_hello(hello: pb.Hello) -> None:
    """Raise ContractError for fields that have another size than fleet.proto says."""
    for name, size in (("epoch", 16), ("boot_id", 16), ("schema_hash", 32)):
        given = len(getattr(hello, name))
        if given != size:
            raise ContractError(
                f"a robot introduced itself with {given} bytes as {name} instead of {size}, so it is refused; install "
                "the same vla-rl on both sides."
            )


def _to_message(record: FleetRecord) -> pb.Record:
    alike = {name: getattr(record, name) for name in _ALIKE}
    return pb.Record(kind=pb.Record.Kind.Value(record.kind.upper()), **alike)


def _from_message(robot: str, epoch: str, record: pb.Record) -> FleetRecord:
    kind = pb.Record.Kind.Name(record.kind).lower() if record.kind in pb.Record.Kind.values() else str(record.kind)
    return FleetRecord(robot=robot, epoch=epoch, kind=kind, **{name: getattr(record, name) for name in _ALIKE})


def _outer_fields(data: bytes) -> Iterator[int]:
    """One item for every field of the message, and for every field of its records."""
    for number, kind, start, end in _fields(data, 0, len(data)):
        yield number
        if (number, kind) == (pb.FromRobot.RECORDS_FIELD_NUMBER, _DELIMITED):
            yield from (inner for inner, *_ in _fields(data, start, end))


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, begin, end) of every field of the message in ``data[start:end]``, without parsing it."""
    while start < end:
        tag, start = _varint(data, start, end)
        kind, begin = tag & 7, start
        if kind == 0:
            _, start = _varint(data, start, end)
        elif kind == _DELIMITED:
            size, begin = _varint(data, start, end)
            start = begin + size
        elif kind in _FIXED:
            start += _FIXED[kind]
        else:
            raise _refused(data, "is no message of protobuf")
        if start > end:
            raise _refused(data, "ends within a field")
        yield tag >> 3, kind, begin, start


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    value = 0
    for index in range(start, min(end, start + _VARINT_BYTES)):
        value |= (data[index] & 0x7F) << 7 * (index - start)
        if data[index] < 0x80:
            return value, index + 1
    raise _refused(data, "ends within a number")


def _refused(data: bytes, why: str) -> ContractError:
    return ContractError(
        f"a message of {len(data)} bytes {why}, so it is refused; look for a foreign or broken program at the other "
        "end."
    )


def call_path(call: str) -> str:
    """The name of a call as gRPC sends it."""
    return f"/{SERVICE}/{call}"


def open_channel(address: str, credentials: Credentials | None) -> grpc.Channel:
    """A channel to ``HOST:PORT``; raises UserError without credentials, unless it is this machine."""
    check_reach(address.rpartition(":")[0], credentials)
    if credentials is None:
        return grpc.insecure_channel(address, OPTIONS)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.private_key, credentials.certificate)
    return grpc.secure_channel(address, tls, OPTIONS)


def add_port(server: grpc.aio.Server, host: str, port: int, credentials: Credentials | None) -> int:
    """Listen and return the port; raises UserError as :func:`open_channel`, RuntimeError when the port is taken."""
    check_reach(host, credentials)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if credentials is None:
        return int(server.add_insecure_port(address))
    pair = (credentials.private_key, credentials.certificate)
    tls = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
    return int(server.add_secure_port(address, tls))


@dataclass(frozen=True)
class BackoffOptions:
    """Seconds: the first wait at most, and the longest."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises UserError for waits without meaning."""
        check_limits(self, first_s=(0.001, 3600.0), longest_s=(self.first_s, 86400.0))


class Backoff:
    """Waits between a half and the whole of ``first_s`` · 2^failures, so that robots do not come back all at once."""

    def __init__(self, options: BackoffOptions, draw: random.Random) -> None:
        self._options, self._draw, self._failures = options, draw, 0

    def next(self) -> float:
        """Seconds to wait now, after another failure."""
        limit = min(self._options.first_s * 2.0 ** min(self._failures, 60), self._options.longest_s)
        self._failures += 1
        return limit * self._draw.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest wait again."""
        self._failures = 0


class Clock:
    """The clock of this machine; a test puts another in its place."""

    def now(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Whether ``event`` came within ``seconds``."""
        return event.wait(seconds)
