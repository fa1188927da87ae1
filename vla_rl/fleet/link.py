"""The robot's end of the fleet's transport: a thread that brings records to the server whenever there is one.

It never gives up: after any failure it waits (longer each time), connects again and goes on behind what the server has
on disk.  Records stay in the robot's spool until the server acknowledges them, so an attempt can end anywhere.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import DecodeError

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.identity import Credentials, check_reach
from vla_rl.fleet.protocol import (
    CHUNK,
    MANIFEST,
    MAX_RECORDS,
    PROTOCOL,
    STREAM,
    Backoff,
    BackoffOptions,
    Clock,
    call_path,
    open_channel,
    read_from_server,
    write_records,
)
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.spool import Spool

log = logging.getLogger("vla_rl.fleet")
_GLANCE_S = 0.2  # how often it is looked whether the server asks for something else


@dataclass(frozen=True)
class LinkOptions:
    """The server's address, and when it counts as gone."""

    address: str = "127.0.0.1:7790"
    silence_s: float = 20.0  # a server that is silent for so long is gone
    heartbeat_s: float = 5.0  # how often it hears something
    batch_kb: int = 256  # of records in a message
    answer_s: float = 60.0  # how long a download of one piece may take
    backoff: BackoffOptions = BackoffOptions()

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning, and for an address without a port."""
        check_limits(self, heartbeat_s=(0.01, 3600.0), silence_s=(self.heartbeat_s, 86400.0), batch_kb=(1, 4096))
        check_limits(self, answer_s=(0.01, 86400.0))
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"{self.address!r} is no address of a fleet's server, so nothing is sent; write HOST:PORT.")


@dataclass
class LinkState:
    """How a robot stands with its server.

    ``durable``: the newest record that the server has on disk, -1 for none; ``trouble``: why the last connection ended;
    ``notice``: what the server wants a person to know; ``policy``: version and state of the one to use.
    """

    connected: bool = False
    attempts: int = 0
    durable: int = -1
    sent: int = 0
    trouble: str = ""
    notice: str = ""
    policy: tuple[int, str] = (0, "")


class UnreachableError(UserError):
    """There is no server now, or it does not have what was asked for."""


class Link:
    """Sends what ``source`` holds until :meth:`close`; ``on_policy(version, state)`` is called in the link's thread.

    Raises UserError for an address of another machine without credentials, and for credentials of another robot.
    """

    def __init__(
        self,
        source: Spool,
        options: LinkOptions,
        credentials: Credentials | None = None,
        on_policy: Callable[[int, str], None] = lambda version, state: None,
        clock: Clock | None = None,
        draw: random.Random | None = None,
    ) -> None:
        check_reach(options.address.rpartition(":")[0], credentials)
        if credentials is not None and credentials.name != source.robot:
            raise UserError(
                f"the spool is of robot {source.robot!r} and the certificate of {credentials.name!r}, so the server "
                "would refuse every record; start the robot with its own certificate."
            )
        self._source, self._options, self._credentials, self._on_policy = source, options, credentials, on_policy
        self._clock, self._boot = clock or Clock(), uuid.uuid4()
        self._backoff = Backoff(options.backoff, draw or random.Random())
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._attempt: Attempt | None = None
        self._state = LinkState()
        self._thread = threading.Thread(target=self._run, name="fleet-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._stop.set()
            if self._attempt is not None:
                self._attempt.cancel()
        self._thread.join()

    def status(self) -> LinkState:
        return replace(self._state)

    def manifest(self, version: int) -> bytes:
        """The manifest of a policy; raises UnreachableError."""
        return self._ask(MANIFEST, pb.ManifestRequest(version=version))

    def chunk(self, digest: str, offset: int, count: int) -> bytes:
        """At most ``count`` bytes from ``offset`` on of the chunk whose SHA-256 is ``digest`` (hexadecimal), b"" behind
        its end; raises UnreachableError.
        """
        data = self._ask(CHUNK, pb.ChunkRequest(sha256=bytes.fromhex(digest), offset=offset, count=count))
        if len(data) > count:
            raise UnreachableError(f"the server sent {len(data)} bytes for {count}, so they are dropped; update it.")
        return data

    def _ask(self, call: str, request: pb.ManifestRequest | pb.ChunkRequest) -> bytes:
        attempt = self._attempt
        if attempt is None or not self._state.connected:
            raise UnreachableError(f"{self._options.address} is not connected, so nothing is downloaded; try later.")
        try:
            ask = attempt.channel.unary_unary(call_path(call))
            return pb.Bytes.FromString(ask(request.SerializeToString(), timeout=self._options.answer_s)).data
        except (grpc.RpcError, DecodeError, ValueError) as error:  # ValueError: the channel was closed meanwhile
            why = error.details() if isinstance(error, grpc.Call) else str(error)
            raise UnreachableError(
                f"{self._options.address} did not answer ({why}), so nothing is downloaded; try later."
            ) from error

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                progress, trouble = self._try()
            except Exception as error:  # of the spool, or threads or memory ran out: all of it may heal
                progress, trouble = False, str(error) or type(error).__name__
            self._state.connected = False
            if progress:
                self._backoff.reset()
            if trouble != self._state.trouble and not self._stop.is_set():
                log.warning("%s: %s; what was not acknowledged stays on this robot", self._options.address, trouble)
            self._state.trouble = trouble
            self._clock.wait(self._stop, self._backoff.next())

    def _try(self) -> tuple[bool, str]:
        """Connect and send until the connection ends: whether anything was achieved, and how it ended."""
        hello = pb.Hello(
            protocol=PROTOCOL,
            robot=self._source.robot,
            epoch=bytes.fromhex(self._source.epoch),
            boot_id=self._boot.bytes,
            schema_hash=bytes(32),  # of a version that says what its records hold
            first_seq=self._source.first_seq,
            next_seq=self._source.next_seq,
        )
        self._state.attempts += 1
        with open_channel(self._options.address, self._credentials) as channel:
            with self._lock:
                if self._stop.is_set():
                    return False, ""
                self._attempt = Attempt(
                    channel, self._source, hello, self._options, self._state, self._clock, self._on_policy
                )
            try:
                return self._attempt.run()
            finally:
                self._attempt = None


class Attempt:
    """Introduces the robot by ``hello``, then sends what ``source`` holds; ``state`` is kept up to date."""

    def __init__(
        self,
        channel: grpc.Channel,
        source: Spool,
        hello: pb.Hello,
        options: LinkOptions,
        state: LinkState,
        clock: Clock,
        on_policy: Callable[[int, str], None],
    ) -> None:
        self.channel, self._source, self._hello, self._options = channel, source, hello, options
        self._state, self._clock, self._on_policy = state, clock, on_policy
        self._changed = threading.Condition()
        self._next: int | None = None  # the record to send now; None before the server's Welcome
        self._credit = 0  # bytes that may be on their way
        self._in_flight = deque[tuple[int, int]]()  # (last record, bytes) of every message that is
        self._heard = clock.now()
        self._progress, self._ended, self._over = False, "", threading.Event()
        self._using = threading.Lock()  # the source, while the connection lasts
        self._call = channel.stream_stream(call_path(STREAM))(self._outgoing())

    def run(self) -> tuple[bool, str]:
        """Until the connection ends: whether the server took anything or stayed for long, and why it ended."""
        receiver = threading.Thread(target=self._receive, name="fleet-receiver", daemon=True)
        receiver.start()
        while not self._clock.wait(self._over, min(1.0, self._options.silence_s / 4)):
            silent = self._clock.now() - self._heard
            if silent > self._options.silence_s:
                self._end(f"the server was silent for {silent:.0f} s")
                self._call.cancel()
        self._call.cancel()
        receiver.join()
        with self._using:  # gRPC's thread is not behind it any more
            pass
        return self._progress, self._ended

    def cancel(self) -> None:
        self._end("the robot ends")

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = self._ended or why
            self._over.set()
            self._changed.notify_all()

    def _receive(self) -> None:
        try:
            for data in self._call:
                self._heard = self._clock.now()
                self._take(read_from_server(data))
            self._end("the server hung up")
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else ""
            self._end(details or "the connection was lost")
        except (UserError, OSError) as error:  # what the server said has no meaning, or the spool failed
            self._end(str(error))
        except Exception as error:
            log.exception("what the server said could not be dealt with")
            self._end(f"{type(error).__name__}: {error}")

    def _take(self, message: pb.FromServer) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._welcome(message.welcome)
            case "ack":
                self._acknowledged(message.ack.durable_seq, message.ack.credit_bytes)
                self._progress = True
            case "nack":
                with self._changed:
                    self._next = message.nack.expected
                    self._in_flight.clear()
                    self._changed.notify_all()
            case "policy":
                self._adopt(message.policy)
            case "notice":
                self._state.notice = message.notice.sentence
                log.warning("%s", message.notice.sentence)
            case "clock" if message.clock.echo_ns:
                self._progress = True  # it stayed for at least a heartbeat

    def _welcome(self, welcome: pb.Welcome) -> None:
        if self._next is not None:
            raise ContractError("the server welcomed this robot twice on one connection, so it is left; update it.")
        self._state.connected, self._state.trouble = True, ""
        self._acknowledged(welcome.durable_seq, welcome.credit_bytes)
        self._adopt(welcome.policy)
        with self._changed:
            self._next = welcome.durable_seq + 1
            self._changed.notify_all()

    def _acknowledged(self, durable: int, credit: int) -> None:
        if durable >= self._source.next_seq:
            raise ContractError(
                f"the server acknowledged record {durable}, which does not exist yet, so it is left; look at what "
                "answers at its address."
            )
        if durable >= 0:
            self._source.acknowledged(durable)
        with self._changed:
            self._state.durable = durable
            self._credit = credit
            while self._in_flight and self._in_flight[0][0] <= durable:
                self._in_flight.popleft()
            self._changed.notify_all()

    def _adopt(self, policy: pb.Policy) -> None:
        latest = (policy.version, policy.state)
        if latest != self._state.policy:
            self._state.policy = latest
            self._on_policy(*latest)

    def _outgoing(self) -> Iterator[bytes]:
        """What gRPC sends, in a thread of its own."""
        try:
            yield pb.FromRobot(hello=self._hello).SerializeToString()
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ended)
            beat = self._clock.now()
            while not self._ended:
                if self._clock.now() - beat >= self._options.heartbeat_s:
                    beat = self._clock.now()
                    yield pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=int(beat * 1e9))).SerializeToString()
                if records := self._batch():
                    yield write_records(records)
        except (UserError, OSError) as error:
            self._end(str(error))
        except Exception as error:
            log.exception("the robot's records could not be sent")
            self._end(f"{type(error).__name__}: {error}")

    def _batch(self) -> Sequence[FleetRecord]:
        """The records to send now; none after a short wait when there are none, or no credit."""
        with self._changed:
            self._changed.wait_for(self._may_send, _GLANCE_S)
            seq = self._next
            if seq is None or not self._may_send():
                return ()
        with self._using:
            if self._ended or not self._source.wait(seq, _GLANCE_S):
                return ()
            records = self._source.unacknowledged(seq, self._options.batch_kb << 10)[:MAX_RECORDS]
        with self._changed:
            if not records or self._next != seq:  # the server asked for others meanwhile
                return ()
            self._next = records[-1].last + 1
            self._in_flight.append((records[-1].last, sum(len(one.encoded) for one in records)))
            self._state.sent += len(records)
            return records

    def _may_send(self) -> bool:
        on_the_way = sum(size for _, size in self._in_flight)
        return not self._in_flight or on_the_way + (self._options.batch_kb << 10) <= self._credit
