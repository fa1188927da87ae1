"""A server's ledger, a robot's spool and policies in memory, with what can go wrong in them, and a stream by hand."""

from __future__ import annotations

import hashlib
import queue
import threading
import uuid

import grpc
import pytest

from vla_rl.contract import wire
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.protocol import PROTOCOL, STREAM, Clock, call_path, open_channel
from vla_rl.fleet.record import NO_HASH, FleetRecord
from vla_rl.fleet.releases import MissingError, Releases


class JumpingClock(Clock):
    """The machine's clock, which can be set forward."""

    def __init__(self) -> None:
        self.ahead, self.waits = 0.0, 0

    def now(self):
        return super().now() + self.ahead

    def wait(self, event, seconds):
        self.waits += 1
        return super().wait(event, seconds)


class WatchedLedger(Ledger):
    """A ledger whose disk can be slow (``slow`` is waited for before every commit) or fail by ``error``."""

    def __init__(self, folder) -> None:
        super().__init__(folder, reserve=0)
        self.commits: list[int] = []  # records in each
        self.slow, self.error, self.waiting = threading.Event(), None, 0
        self.slow.set()

    def append(self, records):
        self.waiting += 1
        self.slow.wait()
        self.waiting -= 1
        if self.error is not None:
            raise self.error
        self.commits.append(len(records))
        return super().append(records)

    @property
    def records(self):
        return [record for _, record in self.read(0, 1 << 20, 1 << 40)]


class MemorySpool:
    """A robot's records in memory."""

    def __init__(self, robot="arm-1", epoch=None, payload=b"") -> None:
        self.robot, self.epoch = robot, epoch or uuid.uuid4().hex
        self.records: list[FleetRecord] = []
        self.first_seq, self.payload = 0, payload or wire.pack({"n": 1})
        self.acknowledgements: list[int] = []
        self.broken: Exception | None = None
        self._more = threading.Condition()

    @property
    def next_seq(self):
        return len(self.records)

    def put(self, count=1, **fields):
        with self._more:
            for _ in range(count):
                previous = self.records[-1].hash if self.records else NO_HASH
                given = {"kind": "step", "episode": "e", "task": "lift", "payload": self.payload, **fields}
                seq = len(self.records)
                self.records.append(
                    FleetRecord(robot=self.robot, epoch=self.epoch, seq=seq, previous=previous, **given)
                )
            self._more.notify_all()

    def unacknowledged(self, seq, max_bytes):
        if self.broken is not None:
            raise self.broken
        found, size = [], 0
        for record in self.records[seq:]:
            size += len(record.payload)
            if found and size > max_bytes:
                break
            found.append(record)
        return found

    def acknowledged(self, seq):
        self.acknowledgements.append(seq)

    def wait(self, seq, seconds):
        with self._more:
            return self._more.wait_for(lambda: len(self.records) > seq, seconds)


def spool_of(count, **given):
    spool = MemorySpool(**given)
    spool.put(count)
    return spool


class MemoryPolicies:
    """Versions of a policy, of one chunk each."""

    def __init__(self) -> None:
        self.version, self.state, self._changes = 0, "", 0
        self._chunks: dict[bytes, bytes] = {}
        self._manifests: dict[int, bytes] = {}

    def publish(self, data: bytes, state="active") -> bytes:
        name = hashlib.sha256(data).digest()
        self._chunks[name] = data
        self.version += 1
        self._manifests[self.version], self.state = b"manifest of " + name, state
        self._changes += 1
        return name

    def head(self, robot):
        return self.version, self.state

    @property
    def releases(self):
        return Releases(self._changes)

    def manifest(self, version):
        if version not in self._manifests:
            raise MissingError(f"there is no policy version {version}.")
        return self._manifests[version]

    def chunk(self, digest, offset, count):
        if bytes.fromhex(digest) not in self._chunks:
            raise MissingError(f"there is no chunk {digest}.")
        return self._chunks[bytes.fromhex(digest)][offset : offset + count]


class Hand:
    """A robot's stream by hand: messages of any kind, as bytes."""

    def __init__(self, port, credentials=None) -> None:
        self.channel = open_channel(f"127.0.0.1:{port}", credentials)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self.channel.stream_stream(call_path(STREAM))(iter(self._queue.get, None))

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._queue.put(None)
        self._call.cancel()
        self.channel.close()

    def send(self, message) -> None:
        self._queue.put(message if isinstance(message, bytes) else message.SerializeToString())

    def next(self, kind):
        """The next message of a kind; others before it are dropped."""
        for data in self._call:
            message = pb.FromServer.FromString(data)
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
        raise AssertionError(f"the server hung up without {kind}")

    def greet(self, spool, **fields):
        self.send(hello(spool, **fields))
        return self.next("welcome")

    def ending(self):
        """The status by which the server ends the stream, and its sentence."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self._call:
                pass
        return caught.value.code(), caught.value.details()


def hello(spool, **fields):
    given = {
        "protocol": PROTOCOL,
        "robot": spool.robot,
        "epoch": bytes.fromhex(spool.epoch),
        "boot_id": bytes(16),
        "schema_hash": bytes(32),
        "first_seq": spool.first_seq,
        "next_seq": spool.next_seq,
        **fields,
    }
    return pb.FromRobot(hello=pb.Hello(**given))
