"""The robot's end of the fleet's transport: a thread that brings records to the server whenever there is one.

It never gives up: after any failure it waits (longer each time), connects again and goes on behind what the server has
on disk.  Records stay in the robot's spool until the server acknowledges them, so an attempt can end anywhere.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

import grpc
from google.protobuf.message import DecodeError

from vla_rl.contract.errors import UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.attempt import Attempt, LinkOptions, LinkState, Source
from vla_rl.fleet.backoff import Backoff, Clock, SystemClock
from vla_rl.fleet.channels import CHUNK, MANIFEST, open_channel, path
from vla_rl.fleet.envelope import PROTOCOL
from vla_rl.fleet.identity import Credentials, check_reach

log = logging.getLogger("vla_rl.fleet")


class UnreachableError(UserError):
    """There is no server now, or it does not have what was asked for."""


class Link:
    """Sends what ``source`` holds until :meth:`close`; ``on_policy(version, state)`` is called in the link's thread.

    Raises UserError for an address of another machine without credentials, and for credentials of another robot.
    """

    def __init__(
        self,
        source: Source,
        options: LinkOptions,
        credentials: Credentials | None = None,
        on_policy: Callable[[int, str], None] = lambda version, state: None,
        schema_hash: bytes = bytes(32),
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
        self._schema, self._clock, self._boot = schema_hash, clock or SystemClock(), uuid.uuid4()
        self._backoff = Backoff(options.backoff, draw or random.Random())
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._attempt: Attempt | None = None
        self._state = LinkState()
        self._thread = threading.Thread(target=self._run, name="fleet-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up; what was not acknowledged stays in the spool."""
        with self._lock:
            self._stop.set()
            if self._attempt is not None:
                self._attempt.cancel()
        self._thread.join()

    def status(self) -> LinkState:
        """The present state."""
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
            ask = attempt.channel.unary_unary(path(call))
            answer: bytes = pb.Bytes.FromString(ask(request.SerializeToString(), timeout=self._options.answer_s)).data
            return answer
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
            schema_hash=self._schema,
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
