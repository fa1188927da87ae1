"""One robot's connection on the server: what it sent, what is on its way to the disk, what it is to be told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.ledger import ConflictError, GapError, Ledger, RefusedError
from vla_rl.fleet.protocol import Clock, read_from_robot, read_records
from vla_rl.fleet.record import FleetRecord, Sender

log = logging.getLogger("vla_rl.fleet")
Code = grpc.StatusCode
_COMMIT_BYTES = 16 << 20  # stored at once


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one sender; ``done`` gets what became of them, in the committer's thread."""

    records: Sequence[FleetRecord]
    size: int  # bytes
    done: Callable[[Batch, Outcome], None]


@dataclass(frozen=True)
class Outcome:
    """``durable``: the sender's newest stored record; or why nothing was stored."""

    durable: int = -1
    refused: RefusedError | None = None
    failed: Exception | None = None


class Committer:
    """Stores batches in the order in which they come, for ever; who sends bounds how many bytes wait."""

    def __init__(self, store: Ledger) -> None:
        self._store, self._waiting = store, deque[Batch]()
        self.trouble = ""  # why the last batches were not stored
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="fleet-committer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Store ``batch`` as soon as those before it are; after :meth:`close` nothing is stored."""
        with self._wake:
            self._waiting.append(batch)
            self._wake.notify()

    def close(self) -> None:
        """End once the present commit is over."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while batches := self._next():
            outcomes = self._store_all(batches)
            for batch, outcome in zip(batches, outcomes, strict=True):
                try:
                    batch.done(batch, outcome)
                except Exception:  # of one robot's connection; the others are stored as before
                    log.exception("a robot could not be told what became of what it sent")

    def _next(self) -> list[Batch]:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            taken: list[Batch] = []
            while self._waiting and not self._closed and sum(one.size for one in taken) < _COMMIT_BYTES:
                taken.append(self._waiting.popleft())
            return taken

    def _store_all(self, batches: Sequence[Batch]) -> list[Outcome]:
        try:
            receipt = self._store.append([record for batch in batches for record in batch.records])
        except Exception as error:  # whatever it is, the robots keep their records and the server goes on
            log.error("%d batches were not stored: %s", len(batches), error)
            self.trouble = str(error) or type(error).__name__
            return [Outcome(failed=error)] * len(batches)
        self.trouble = ""
        senders = [batch.records[0].sender for batch in batches]
        return [Outcome(receipt.durable[sender], receipt.refused.get(sender)) for sender in senders]


class End(Exception):
    """Why a connection ends, or is not accepted, for the robot and the log."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code, self.sentence = code, sentence


class Session:
    """``credit``: how many bytes may be received and not stored yet; ``alarm`` gets what a person should look at.

    No more than the credit and one message are in memory: further messages are not read until the disk has caught up.
    Everything happens in one event loop; ``later(do, *given)`` has other threads do something there.
    """

    def __init__(
        self,
        sender: Sender,
        durable: int,
        committer: Committer,
        clock: Clock,
        credit: int,
        alarm: Callable[[str], None],
        later: Callable[..., object],
    ) -> None:
        self.sender, self._committer, self._clock, self._credit, self._alarm = sender, committer, clock, credit, alarm
        self.heard = clock.now()
        self.durable = durable
        self.policy: tuple[int, str] | None = None  # what the robot was sent
        self.offered = durable  # the newest record that the robot had when it came
        self._expected = durable + 1
        self._refusing = False  # everything until the expected record comes
        self._in_flight = 0  # bytes
        self._outbox: dict[str, pb.FromServer] = {}  # the newest of each kind
        self.reason: End | None = None  # why it ends
        self._later, self._told, self._room = later, asyncio.Event(), asyncio.Event()
        self.ending = asyncio.Event()  # is set once there is a reason

    @property
    def busy(self) -> bool:
        """Whether the disk has to catch up, so that silence says nothing about the robot."""
        return self._in_flight > 0

    @property
    def behind(self) -> int:
        """How many of the records that the robot came with are not on disk."""
        return max(0, self.offered - self.durable)

    def tell(self, message: pb.FromServer) -> None:
        """Send ``message``, in place of an older one of its kind that has not been sent."""
        kind = message.WhichOneof("message")
        self._outbox.pop(kind, None)
        self._outbox[kind] = message
        self._told.set()

    def end(self, code: grpc.StatusCode, sentence: str) -> None:
        """End the connection after what is still to be sent; the first reason counts."""
        self.reason = self.reason or End(code, sentence)
        for event in (self.ending, self._told, self._room):
            event.set()

    async def outgoing(self) -> AsyncIterator[bytes]:
        """What the robot is told, as it comes, until the connection ends."""
        while message := await self._next():
            yield message.SerializeToString()

    async def read(self, incoming: AsyncIterator[bytes]) -> None:
        """Take what the robot sends until the connection ends; raises nothing but its own cancellation."""
        try:
            async for data in incoming:
                self.heard = self._clock.now()
                self._take(data)
                while self._in_flight > self._credit and not self.reason:
                    self._room.clear()
                    await self._room.wait()
                if self.reason:
                    return
            self.end(Code.OK, "the robot hung up")
        except (grpc.RpcError, grpc.aio.BaseError):
            self.end(Code.CANCELLED, "the connection was lost")
        except ContractError as error:
            log.warning("refused %s: %s", self.sender.robot, error)
            self.end(Code.INVALID_ARGUMENT, str(error))
        except Exception:
            log.exception("a connection of %s failed", self.sender.robot)
            self.end(Code.INTERNAL, "the server made a mistake, which is in its log; what it stored stays stored.")

    async def _next(self) -> pb.FromServer | None:
        while not (self._outbox or self.reason):
            self._told.clear()
            await self._told.wait()
        return self._outbox.pop(next(iter(self._outbox))) if self._outbox else None

    def _take(self, data: bytes) -> None:
        message = read_from_robot(data)
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            clock = pb.Clock(wall_ns=self._clock.wall_ns(), echo_ns=message.heartbeat.sent_ns)
            self.tell(pb.FromServer(clock=clock))
        elif kind == "records":
            self._take_records(message.records, len(data))
        else:
            raise ContractError(
                f"robot {self.sender.robot!r} introduced itself twice on one connection, so it is refused; update it."
            )

    def _take_records(self, message: pb.Records, size: int) -> None:
        records = read_records(*self.sender, message)
        if records[0].seq > self._expected:
            if not self._refusing:  # what was on its way is refused silently
                self._refuse()
            return
        self._refusing = False
        self._expected = max(self._expected, records[-1].last + 1)
        self._in_flight += size
        self._committer.submit(Batch(records, size, self._committed))

    def _refuse(self) -> None:
        self._refusing = True
        self.tell(pb.FromServer(nack=pb.Nack(expected=self._expected)))

    def _committed(self, batch: Batch, outcome: Outcome) -> None:
        """In the committer's thread."""
        self._later(self._stored, batch, outcome)

    def _stored(self, batch: Batch, outcome: Outcome) -> None:
        self._in_flight -= batch.size
        self._room.set()
        if outcome.failed is None:
            self.durable = max(self.durable, outcome.durable)
            ack = pb.Ack(durable_seq=self.durable, credit_bytes=self._credit)
            self.tell(pb.FromServer(ack=ack))
        match outcome.refused or outcome.failed:
            case GapError() as gap:
                self._expected = gap.expected
                self._refuse()
            case ConflictError() as conflict:
                self._alarm(str(conflict))
                self.end(Code.FAILED_PRECONDITION, str(conflict))
            case UserError() | OSError() as error:
                self.end(Code.UNAVAILABLE, f"the server cannot store anything now ({error}); it keeps your place.")
            case Exception():
                self.end(Code.INTERNAL, "the server could not store a batch; its log says why.")
