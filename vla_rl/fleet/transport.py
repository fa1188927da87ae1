"""The server's end of the fleet's transport: gRPC over mutual TLS, one stream per robot, records stored exactly once.

A robot says which spool it has (Hello), hears how far that is on disk (Welcome), sends from there and is told what has
reached the disk (Ack).  Nothing else makes sure of anything: after any failure on either side it connects again.

All streams are in the event loop of one thread, which waits for no disk: a robot costs no thread.

gRPC bounds connections before a handshake, and ends those whose handshake takes too long.  What it cannot do is done
here: of those behind which no robot is known, each address keeps a few, and they give way to newer ones.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import socket
import stat
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.identity import Credentials, Revoked, robot_of
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.protocol import (
    CHUNK,
    CHUNK_BYTES,
    MANIFEST,
    OPTIONS,
    PROTOCOL,
    SERVICE,
    STREAM,
    Clock,
    add_port,
    check_hello,
    read_from_robot,
)
from vla_rl.fleet.record import NAME, Sender
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import MissingError
from vla_rl.fleet.session import Code, Committer, End, Session

log = logging.getLogger("vla_rl.fleet")
_AT_ONCE = 4  # downloads of a robot, also those that it does not read
_TICK_S = 0.2  # how often connections and policies are looked at
_ALARMS = 100  # that are remembered
_SPOOLS = 4  # connections of one name
_UNKNOWN = 32  # that have not introduced themselves, of all who need no certificate
_MIN_CREDIT, _MAX_CREDIT = 64 << 10, 8 << 20
HANDSHAKE_S = 10.0  # after which a connection behind which no robot is known is ended
_OF_ADDRESS, _OF_ALL = 32, 128  # connections behind which no robot is known
_FEWEST, _MOST = 64, 512  # connections besides those of robots
_RESERVE = 192  # files for ledger, registry, page, learner and gRPC itself
_FOLDER = "/dev/fd"  # the files that this process has open
_LAST_WORDS_S = 2.0  # seconds for what an ending connection still has to send
_READERS = 16  # threads that read for whoever connects or downloads
Peer = tuple[str, int]  # address and port
Context: TypeAlias = grpc.aio.ServicerContext
T = TypeVar("T")


@dataclass(frozen=True)
class TransportOptions:
    """Where the server listens and what it bounds.

    ``memory_mb`` is for what robots have sent and the disk has not taken yet: ``max_robots`` equal shares of 64 kB to
    8 MB.  A message more of each robot may be in memory besides.
    """

    host: str = "127.0.0.1"
    port: int = 7790  # 0: any that is free
    max_robots: int = 256
    memory_mb: int = 256
    silence_s: float = 20.0  # a robot that is silent for so long is gone
    heartbeat_s: float = 5.0  # how often each robot hears something

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, port=(0, 65535), max_robots=(1, 4096), memory_mb=(1, 1 << 20))
        check_limits(self, heartbeat_s=(0.01, 3600.0), silence_s=(self.heartbeat_s, 86400.0))

    @property
    def credit(self) -> int:
        """Bytes that each robot may have sent before they are on disk."""
        return max(_MIN_CREDIT, min((self.memory_mb << 20) // self.max_robots, _MAX_CREDIT))


class _Connected(NamedTuple):
    session: Session
    peer: Peer
    certificate: bytes


class _Known(NamedTuple):
    """Of whoever introduced itself.

    durable  its newest stored record, -1 for none
    before   whether its name had another spool
    policy   what it is to run
    """

    durable: int
    before: bool
    policy: tuple[int, str]


class FleetTransport:
    """Serves ``store`` and ``policies`` until :meth:`close`.

    Raises UserError when other machines could connect and there are no credentials, and when the port is taken.
    """

    def __init__(
        self,
        store: Ledger,
        policies: Registry,
        options: TransportOptions,
        credentials: Credentials | None = None,
        revoked: Revoked | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._policies, self._options = store, policies, options
        self._credentials, self._revoked = credentials, revoked or Revoked(None)
        self._clock = clock or Clock()
        self.id = uuid.uuid4()
        self.alarms: deque[str] = deque(maxlen=_ALARMS)
        self._connected: dict[Sender, _Connected] = {}
        # Whose certificate it is, and since when they have not introduced themselves; the oldest first.
        self._opening: dict[asyncio.Event, tuple[str, float]] = {}
        self._downloads = Downloads(self._policies, lambda context: self._certified(_certificate(context)))
        self._stop = threading.Event()
        self._crowded = False  # connections of strangers were ended just now
        self._loop, self._readers = asyncio.new_event_loop(), ThreadPoolExecutor(_READERS, "fleet-reader")
        self._loop.set_default_executor(self._readers)
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        try:
            self._server, self.port = self._do(self._begin())
        except RuntimeError as error:
            self._end_loop()
            raise UserError(
                f"{options.host}:{options.port} cannot be listened on ({error}), so no robot could connect; end the "
                "program that has it, or choose another port."
            ) from error
        except BaseException:
            self._end_loop()
            raise
        self.committer, self._connections = Committer(store), Connections(self.port)
        self._do(self._server.start())
        self._watch = threading.Thread(target=self._look_after, name="fleet-watch", daemon=True)
        self._watch.start()

    async def _begin(self) -> tuple[grpc.aio.Server, int]:
        calls = {STREAM: grpc.stream_stream_rpc_method_handler(self._stream), **self._downloads.calls()}
        robots = self._options.max_robots
        server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(SERVICE, calls)],
            options=(*OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections(robots))),
            maximum_concurrent_rpcs=4 * robots + 64,
        )
        return server, add_port(server, self._options.host, self._options.port, self._credentials)

    def close(self) -> None:
        """End all connections; robots come back by themselves when there is a server again."""
        self._stop.set()
        self._watch.join()
        self._do(self._ended())
        self.committer.close()
        self._end_loop()

    async def _ended(self) -> None:
        for one in self._connected.values():
            one.session.end(Code.UNAVAILABLE, "the server ends; come back.")
        await self._server.stop(1.0)

    def _end_loop(self) -> None:
        self._soon(self._loop.stop)
        self._thread.join()
        self._readers.shutdown()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        """What becomes of it in the loop, for other threads."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def _soon(self, do: Callable[..., object], *given: object) -> None:
        """Have the loop do it, for other threads; nothing where it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do, *given)

    def waiting(self) -> dict[str, int]:
        """The robots that are here, and how many of the records that they came with are not on disk yet."""
        present = self._present()
        names = {one.session.sender.robot for one in present}
        return {name: sum(one.session.behind for one in present if one.session.sender.robot == name) for name in names}

    def alarm(self, sentence: str) -> None:
        """Note what a person should look at."""
        log.error("%s", sentence)
        self.alarms.append(sentence)

    async def _stream(self, incoming: AsyncIterator[bytes], context: Context) -> None:
        try:
            session = await self._accept(incoming, context)
        except End as end:
            await _abort(context, end)
        reading = asyncio.create_task(session.read(incoming))
        writing = asyncio.create_task(_write(session, context))
        try:
            await session.ending.wait()
            await asyncio.wait({writing}, timeout=_LAST_WORDS_S)  # who does not read hears no more
            assert session.reason is not None
            if session.reason.code is not Code.OK:
                await _abort(context, session.reason)
        finally:
            reading.cancel()
            writing.cancel()
            self._leave(session)

    async def _accept(self, incoming: AsyncIterator[bytes], context: Context) -> Session:
        """The session of whoever introduces itself first; raises End.

        Who takes long gives way to who comes later with the same certificate.
        """
        over = asyncio.Event()
        try:
            certificate = _certificate(context)
            robot = self._certified(certificate)
            alike = [one for one, (owner, _) in self._opening.items() if owner == robot]
            self._opening[over] = robot, self._clock.now()
            for older in alike[: max(0, len(alike) + 1 - (_SPOOLS if robot else _UNKNOWN))]:
                older.set()
            hello = read_from_robot(await _first(incoming, over)).hello
            check_hello(hello)
            sender = Sender(robot or hello.robot, hello.epoch.hex())
            self._check(sender, hello)
            known = await asyncio.to_thread(self._known, sender)
            return self._welcome(sender, hello, known, peer_of(context.peer()), certificate)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            raise End(Code.CANCELLED, "a connection ended before anybody introduced itself") from error
        except ContractError as error:
            raise End(Code.INVALID_ARGUMENT, str(error)) from error
        except UserError as error:
            raise End(Code.PERMISSION_DENIED, str(error)) from error
        except (OSError, MemoryError) as error:
            raise End(Code.UNAVAILABLE, f"the server cannot take anybody in now ({error}); come back.") from error
        finally:
            self._opening.pop(over, None)

    def _certified(self, certificate: bytes) -> str:
        """The robot that a connection's certificate names; "" without TLS, on this machine alone."""
        return "" if self._credentials is None else robot_of(certificate, self._revoked)

    def _known(self, sender: Sender) -> _Known:
        """What disks say of whoever introduced itself; they may be slow."""
        others = [one for one in self._store.senders() if one.robot == sender.robot and one != sender]
        return _Known(self._store.durable(*sender), bool(others), self._policies.head(sender.robot))

    def _welcome(self, sender: Sender, hello: pb.Hello, known: _Known, peer: Peer, certificate: bytes) -> Session:
        older = self._connected.get(sender)
        alike = [one.session for other, one in self._connected.items() if other.robot == sender.robot]
        full = len(self._connected) >= self._options.max_robots or len(alike) >= _SPOOLS
        if full and older is None:
            raise End(Code.RESOURCE_EXHAUSTED, "the server has as many robots as it takes; raise max_robots.")
        durable, credit = known.durable, self._options.credit
        self._check_place(sender, hello, durable)
        session = Session(sender, durable, self.committer, self._clock, credit, self.alarm, self._soon)
        self._connected[sender] = _Connected(session, peer, certificate)
        if older is not None:
            sentence = f"a newer connection of robot {sender.robot!r} with the same spool took over."
            older.session.end(Code.ABORTED, sentence)
        session.offered, session.policy = hello.next_seq - 1, known.policy
        welcome = pb.Welcome(
            server=self.id.bytes,
            durable_seq=durable,
            credit_bytes=credit,
            policy=pb.Policy(version=known.policy[0], state=known.policy[1]),
            clock=pb.Clock(wall_ns=self._clock.wall_ns()),
        )
        session.tell(pb.FromServer(welcome=welcome))
        others = [one for one in alike if one.sender != sender]
        if others or (durable < 0 and known.before):
            self._tell_of_namesakes([session, *others])
        log.info("%s is here, spool %s, %d records on disk", sender.robot, sender.epoch[:8], durable + 1)
        return session

    def _check(self, sender: Sender, hello: pb.Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise End(
                Code.FAILED_PRECONDITION,
                f"robot {sender.robot!r} speaks version {hello.protocol} of the protocol and the server {PROTOCOL}, so "
                "it is refused; install the same vla-rl on both.",
            )
        if not NAME.fullmatch(sender.robot) or hello.robot != sender.robot:
            raise End(
                Code.PERMISSION_DENIED,
                f"a robot calls itself {hello.robot[:64]!r} and its certificate names {sender.robot[:64]!r}, so it is "
                "refused; start it with the name of its certificate.",
            )

    def _check_place(self, sender: Sender, hello: pb.Hello, durable: int) -> None:
        what = ""
        if hello.next_seq <= durable:
            what = f"ends before record {hello.next_seq}, of which {durable + 1} are on the server: it was set back"
        elif hello.first_seq > durable + 1:
            what = f"begins with record {hello.first_seq}, but the server has {durable + 1}: its ledger is another one"
        if what:
            sentence = (
                f"the spool of robot {sender.robot!r} {what}, so nothing is taken; start the server on the ledger that "
                "it had, or the robot with a new spool."
            )
            self.alarm(sentence)
            raise End(Code.FAILED_PRECONDITION, sentence)

    def _tell_of_namesakes(self, present: list[Session]) -> None:
        """Two spools of one name are two robots, or one that was replaced; a person has to know which."""
        new = present[0].sender
        sentence = (
            f"robot {new.robot!r} is here with a new spool {new.epoch[:8]}, and had another one before; if it was not "
            "replaced, two robots have one name: give one a certificate of its own."
        )
        self.alarm(sentence)
        for one in present:
            one.tell(pb.FromServer(notice=pb.Notice(sentence=sentence)))

    def _present(self) -> list[_Connected]:
        """Also for other threads."""
        return list(self._connected.values())

    def _leave(self, session: Session) -> None:
        reason = session.reason
        session.end(Code.CANCELLED, "the connection ended")
        present = self._connected.get(session.sender)
        if present is not None and present.session is session:  # and not a newer one
            del self._connected[session.sender]
        log.info("%s left: %s", session.sender.robot, reason.sentence if reason else "the connection ended")

    # -- in a thread of its own, since it looks at files --------------------------------------------------------------

    def _look_after(self) -> None:
        """End who is silent or revoked, tell all others the time and new policies."""
        spoken, changes = self._clock.now(), -1
        while not self._clock.wait(self._stop, _TICK_S):
            now = self._clock.now()
            try:
                speak = now - spoken >= self._options.heartbeat_s
                spoken = now if speak else spoken
                self._put_out(now, speak)
                if (latest := self._policies.releases.head) != changes:
                    for one in self._present():
                        self._soon(_announce, one.session, self._policies.head(one.session.sender.robot))
                    changes = latest
            except Exception:  # files, threads or memory ran out: all is looked at again
                log.exception("connections could not be looked after")

    def _put_out(self, now: float, speak: bool) -> None:
        for over, (_, since) in list(self._opening.items()):
            if now - since > self._options.silence_s:
                self._soon(over.set)
        present = self._present()
        for one in present:
            if speak:
                self._speak(one)
            silent = now - one.session.heard
            if silent > self._options.silence_s and not one.session.busy:
                log.warning("%s has been silent for %.0f s", one.session.sender.robot, silent)
                self._soon(one.session.end, Code.CANCELLED, "the robot was silent for too long; come back.")
        known = {one.peer for one in present} | self._downloads.peers()
        ended = self._connections.end_strangers(known, time.monotonic())
        if self._crowded and not ended:
            give_back()
        self._crowded = bool(ended)
        for address, count in ended.items():
            log.warning("%d connections from %s were ended, behind which no robot was known", count, address)

    def _speak(self, one: _Connected) -> None:
        self._soon(one.session.tell, pb.FromServer(clock=pb.Clock(wall_ns=self._clock.wall_ns())))
        try:
            self._certified(one.certificate)
        except UserError as error:
            self._soon(one.session.end, Code.PERMISSION_DENIED, str(error))


def _announce(session: Session, head: tuple[int, str]) -> None:
    if head != session.policy:
        session.policy = head
        session.tell(pb.FromServer(policy=pb.Policy(version=head[0], state=head[1])))


async def _first(incoming: AsyncIterator[bytes], over: asyncio.Event) -> bytes:
    """The first message; raises End where ``over`` is set before it comes."""
    first, gone = asyncio.ensure_future(anext(incoming, b"")), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise End(Code.CANCELLED, "nobody introduced himself; come back.")
        return first.result()
    finally:
        first.cancel()
        gone.cancel()


async def _write(session: Session, context: Context) -> None:
    try:
        async for message in session.outgoing():
            await context.write(message)
    except (grpc.RpcError, grpc.aio.BaseError):
        session.end(Code.CANCELLED, "the connection was lost")


async def _abort(context: Context, end: End) -> NoReturn:
    if end.code is not Code.CANCELLED:
        log.warning("a connection from %s ends: %s", context.peer(), end.sentence)
    await context.abort(end.code, end.sentence)
    raise AssertionError("abort raises")


def _certificate(context: Context) -> bytes:
    """What the robot has shown, in PEM; b"" without TLS."""
    return b"".join(context.auth_context().get("x509_pem_cert", ()))


class Downloads:
    """Answers from ``policies`` to whom ``admit`` lets in; it raises UserError for anybody else."""

    def __init__(self, policies: Registry, admit: Callable[[Context], str]) -> None:
        self._policies, self._admit = policies, admit
        self._running: list[tuple[str, Peer]] = []  # whose, and where to

    def peers(self) -> set[Peer]:
        """Where something is on its way to; also for other threads."""
        return {peer for _, peer in list(self._running)}

    def calls(self) -> dict[str, grpc.RpcMethodHandler]:
        """gRPC's handlers by name."""
        return {
            MANIFEST: grpc.unary_unary_rpc_method_handler(self._manifest),
            CHUNK: grpc.unary_unary_rpc_method_handler(self._chunk),
        }

    async def _manifest(self, data: bytes, context: Context) -> bytes:
        return await self._answer(lambda: self._policies.manifest(pb.ManifestRequest.FromString(data).version), context)

    async def _chunk(self, data: bytes, context: Context) -> bytes:
        def read() -> bytes:
            asked = pb.ChunkRequest.FromString(data)
            if len(asked.sha256) != 32:
                raise ContractError(f"a chunk was asked for by {len(asked.sha256)} bytes; ask by its SHA-256.")
            return self._policies.chunk(asked.sha256.hex(), asked.offset, min(asked.count, CHUNK_BYTES))

        return await self._answer(read, context)

    async def _answer(self, read: Callable[[], bytes], context: Context) -> bytes:
        code, sentence = Code.INTERNAL, "the server made a mistake, which is in its log."
        try:
            self._begin(self._admit(context), context)
            return pb.Bytes(data=await asyncio.to_thread(read)).SerializeToString()
        except MissingError as error:
            code, sentence = Code.NOT_FOUND, str(error)
        except ContractError as error:
            code, sentence = Code.INVALID_ARGUMENT, f"a request for a policy was refused: {error}"
        except DecodeError as error:
            code, sentence = Code.INVALID_ARGUMENT, f"a request for a policy cannot be read ({error}); update vla-rl."
        except UserError as error:
            code, sentence = Code.PERMISSION_DENIED, str(error)
        except BlockingIOError as error:
            code, sentence = Code.RESOURCE_EXHAUSTED, str(error)
        except Exception:
            log.exception("a download failed")
        log.warning("a download by %s was refused: %s", context.peer(), sentence)
        await context.abort(code, sentence)
        raise AssertionError("abort raises")

    def _begin(self, robot: str, context: Context) -> None:
        """Count it until it has arrived or was given up; raises BlockingIOError where a robot has too many."""
        peer = peer_of(context.peer())
        one = (robot or f"{peer}", peer)  # without certificates a connection is a robot
        if sum(owner == one[0] for owner, _ in self._running) >= _AT_ONCE:
            raise BlockingIOError(f"a robot may download {_AT_ONCE} pieces at once, so this one waits; ask later.")
        self._running.append(one)
        context.add_done_callback(lambda _: self._running.remove(one))


def most_connections(robots: int) -> int:
    """How many connections a server of so many robots takes; raises UserError when too few files may be open.

    The limit of open files is raised as far as it may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = robots + _MOST + _RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft - _RESERVE - robots)
    if left < _FEWEST:
        raise UserError(
            f"this process may open {soft} files, too few for {robots} robots, which need "
            f"{robots + _FEWEST + _RESERVE}, so no server is started; raise the limit (ulimit -n), or lower max_robots."
        )
    return robots + left


def peer_of(text: str) -> Peer:
    """Address and port in gRPC's words, as "ipv4:10.0.0.7:5512"; ("", 0) for others."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return (host.strip("[]").removeprefix("::ffff:"), int(port)) if port.isdigit() else ("", 0)


def give_back() -> None:
    """Return to the system the memory of connections that ended: the C library keeps it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class Connections:
    """Those that were accepted at ``port`` of this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._since: dict[Peer, float] = {}

    def end_strangers(self, known: Set[Peer], now: float) -> dict[str, int]:
        """End connections of others than ``known`` that are too old or too many, the oldest first; how many of whom.

        ``now``: seconds of a clock that only grows.
        """
        found = {peer: handle for peer, handle in self._accepted() if peer not in known}
        self._since = {peer: self._since.get(peer, now) for peer in found}
        left: defaultdict[str, int] = defaultdict(int)
        ended: defaultdict[str, int] = defaultdict(int)
        for peer in sorted(found, key=lambda peer: -self._since[peer]):  # the newest first
            left[peer[0]] += 1
            left[""] += 1
            old = now - self._since[peer] > HANDSHAKE_S
            if old or left[peer[0]] > _OF_ADDRESS or left[""] > _OF_ALL:
                self._peer(found[peer], peer)
                ended[peer[0]] += 1
        return ended

    def _accepted(self) -> Iterator[tuple[Peer, int]]:
        for name in os.listdir(_FOLDER):
            if (peer := self._peer(int(name))) is not None:
                yield peer, int(name)

    def _peer(self, handle: int, ending: Peer | None = None) -> Peer | None:
        """Who is connected by this open file, None where it is something else; ended if it is ``ending``.

        A copy of the file is looked at, one at a time, as gRPC may close its own at any moment.
        """
        try:
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                return None
            with socket.socket(fileno=os.dup(handle)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                    return None
                host, port = sock.getpeername()[:2]
                peer = (host.removeprefix("::ffff:"), port)
                if peer == ending:
                    sock.shutdown(socket.SHUT_RDWR)
                return peer
        except OSError:  # it listens, was closed meanwhile, or there is no file for a copy
            return None
