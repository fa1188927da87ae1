"""One WebSocket connection (RFC 6455) on a blocking socket, with a limit for every message, a deadline for every wait.

The frames are those of the ``websockets`` package; the socket is ours, because a deadline for a message that has begun
to arrive needs to know when its first byte came.  No extension is negotiated, so nothing is ever decompressed.

:class:`Listener` refuses what no protocol has to know about: other machines (without TLS and the API key), web pages (a
request with an Origin), messages that are oversized, malformed or slow, and connections beyond a number.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidURI
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import Event, State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from vla_rl.contract.config import Checked, above_zero
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import is_loopback
from vla_rl.serving.access import VARIABLE, Access, ApiKey, Refusal

_frames = logging.getLogger("vla_rl.serving.frames")
_CHUNK = 1 << 16
Opening = TypeVar("Opening", Request, Response)
_REASON = 120  # bytes that a close frame has room for
_LINGER = 1.0  # seconds in which the other side may read why it was refused
_AT_ONCE = 1e-3  # seconds that remain for what is sent at once, however late this process comes to it
_IN_ORDER = (CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY)
_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
Protocol = ClientProtocol | ServerProtocol
log = logging.getLogger("vla_rl.serving")
_FAREWELL = 1.0  # seconds that open connections have in all when the server is closed


_frames.setLevel(logging.WARNING)  # whatever others have: at DEBUG, every header is written down, and so the API key


@dataclass(frozen=True)
class Limits(Checked):
    """What one connection may cost; whoever exceeds it is refused and disconnected."""

    message_bytes: int = above_zero(64 << 20)
    opening_s: float = above_zero(10.0)  # to connect and agree on the protocol
    message_s: float = above_zero(30.0)  # to send or receive one message, from its first byte to its last
    idle_s: float = above_zero(900.0)  # between messages, while the other side computes


LIMITS = Limits()


class DisconnectedError(UserError):
    """The connection ended: the other side closed it, took too long, or sent what is refused."""


class ClosedError(DisconnectedError):
    """The other side said goodbye in order."""


class Connection:
    """An open connection to ``peer``, which only names the other side in messages."""

    def __init__(self, sock: socket.socket, protocol: Protocol, peer: str, limits: Limits) -> None:
        self.peer, self.limits = peer, limits
        self._socket, self._protocol = sock, protocol
        self._events: deque[Event] = deque()
        self._surplus = 0  # bytes that have arrived of a frame that is not whole yet
        self._fragments = False  # a message is not whole although its last frame is
        self._begun: float | None = None  # when the message began that is not whole yet

    def send(self, data: bytes | str) -> None:
        """Send one message, binary or text; raises DisconnectedError when it is not taken within ``message_s``."""
        text = isinstance(data, str)
        data = data.encode() if isinstance(data, str) else data
        if len(data) > self.limits.message_bytes:
            raise UserError(
                f"a message for {self.peer} has {len(data)} bytes, more than {self.limits.message_bytes}, so it is not "
                "sent; send smaller images or raise the limit."
            )
        self._require_open()
        (self._protocol.send_text if text else self._protocol.send_binary)(data)
        self._flush()

    def receive(self, wait_s: float | None = None) -> bytes | str:
        """The next message, which begins within ``wait_s`` (``idle_s`` if None) and is whole ``message_s`` later.

        Bytes of a binary message, a text of a text message.  Raises DisconnectedError otherwise.
        """
        wait_s = self.limits.idle_s if wait_s is None else wait_s
        now = time.monotonic()
        idle_until, self._begun = now + wait_s, now if self._begun is not None else None
        kind, message = Opcode.BINARY, bytearray()
        while True:
            while self._events:
                frame = self._events.popleft()  # no pings, which the protocol has answered
                if not isinstance(frame, Frame):
                    continue
                kind = kind if frame.opcode is Opcode.CONT else frame.opcode
                message += frame.data
                if frame.fin:
                    return self._decoded(message) if kind is Opcode.TEXT else bytes(message)
            self._require_open()
            self._read(idle_until if self._begun is None else self._begun + self.limits.message_s)
            self._reply()

    def attend(self) -> None:
        """Between two messages: answer pings that have arrived, without waiting; the next message is kept.

        Nothing more is read when a part of it is whole, so whoever sends on and on is held up and takes no memory.
        Raises DisconnectedError when the other side has left, or is too slow with that message.
        """
        self._require_open()
        if not self._events:
            self._read(None if self._begun is None else self._begun + self.limits.message_s, wait=False)
            self._reply()
            self._require_open()

    def close(self, code: CloseCode = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Say goodbye, with a ``reason``, and free the socket; safe to call twice."""
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(code, reason.encode()[:_REASON].decode(errors="ignore"))
            self._push(_LINGER)
            self._linger()
        self._socket.close()

    # -- the opening ------------------------------------------------------------------------------------------------

    @classmethod
    def accept(
        cls,
        sock: socket.socket,
        peer: str,
        limits: Limits,
        pages: Mapping[str, str],
        refusal: Callable[[str], Refusal | None] = lambda _: None,
    ) -> Connection | None:
        """As the server: who opens a WebSocket on ``sock``; None for any other or refused request, which is answered.

        ``pages`` are the texts of plain HTTP pages by path.  ``refusal`` says of the request's Authorization ("" for
        none) with what status and sentence it is refused.  A request with an Origin comes from a web page of some site,
        not from a program, and is refused.
        """
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        protocol = ServerProtocol(origins=[None], max_size=limits.message_bytes, logger=_frames)
        connection = cls(sock, protocol, peer, limits)
        request = connection._opening(Request)
        early = protocol.data_to_send()  # pongs to what came with the request, which the response precedes
        given = request.headers.get_all("Authorization")
        page = (HTTPStatus.OK, pages[request.path]) if request.path in pages else refusal(given[0] if given else "")
        protocol.send_response(protocol.reject(*page) if page else protocol.accept(request))
        connection._flush(early)
        if protocol.state is State.OPEN:
            return connection
        connection.close()
        return None

    def open(self, key: ApiKey | None = None) -> None:
        """As the client: ask for a WebSocket; raises DisconnectedError when the server has none here."""
        assert isinstance(self._protocol, ClientProtocol)
        request = self._protocol.connect()
        if key:
            request.headers["Authorization"] = key.header()
        self._protocol.send_request(request)
        self._flush()
        response = self._opening(Response)
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise self._lost(f"wants {'another' if key else 'an'} API key (key_file=FILE of its address or {VARIABLE})")
        if self._protocol.handshake_exc is not None:
            raise self._lost(f"refused the connection ({response.status_code} {response.reason_phrase})")
        self._reply()  # to what came with the response

    def _opening(self, kind: type[Opening]) -> Opening:
        self._begun = time.monotonic()
        until, arrived = self._begun + self.limits.opening_s, b""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, kind):
                    self._note(len(arrived.partition(b"\r\n\r\n")[2]) - len(arrived))
                    return event
            failure = self._protocol.handshake_exc
            if failure is not None or self._protocol.state is State.CLOSED:
                raise self._lost(f"did not open a WebSocket ({failure or 'it hung up'})")
            arrived += self._read(until)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _read(self, until: float | None, wait: bool = True) -> bytes:
        """Take what has arrived; raises DisconnectedError when that is nothing ``until`` then."""
        left = math.inf if until is None else until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left if wait else 0.0)
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b""
        except TimeoutError as error:
            what = "sent nothing for too long" if self._begun is None else "was too slow with a message"
            raise self._lost(what, CloseCode.POLICY_VIOLATION) from error
        except OSError as error:
            raise self._lost(f"broke the connection ({error})") from error
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        events = self._protocol.events_received()
        frames = [event for event in events if isinstance(event, Frame)]
        self._events.extend(event for event in events if not isinstance(event, Frame) or event.opcode in _DATA)
        self._note(len(data), frames)
        return data

    def _note(self, arrived: int, frames: Sequence[Frame] = ()) -> None:
        """Keep account of whether a message is on its way, after ``arrived`` bytes that completed ``frames``."""
        masked = 4 if isinstance(self._protocol, ServerProtocol) else 0
        self._surplus += arrived
        for frame in frames:
            size = len(frame.data)
            self._surplus -= 2 + (0 if size < 126 else 2 if size < 1 << 16 else 8) + masked + size
            if frame.opcode in _DATA:
                self._fragments = not frame.fin
                self._begun = self._begun if self._fragments else None
        if self._surplus <= 0 and not self._fragments:
            self._begun = None
        elif self._begun is None:
            self._begun = time.monotonic()

    def _push(self, timeout_s: float, after: Sequence[bytes] = ()) -> None:
        until = time.monotonic() + timeout_s
        for data in (*self._protocol.data_to_send(), *after):
            rest = memoryview(data)
            while rest:  # as sendall, which with TLS has the timeout for every part and not for all of it
                self._socket.settimeout(max(_AT_ONCE, until - time.monotonic()))
                rest = rest[self._socket.send(rest) :]
                if rest and time.monotonic() >= until:
                    raise TimeoutError
            if not data:
                self._socket.shutdown(socket.SHUT_WR)

    def _reply(self) -> None:
        """Answer what has arrived; whoever has said goodbye may be gone before the answer to that."""
        try:
            self._flush()
        except DisconnectedError:
            if self._protocol.close_rcvd is None:
                raise

    def _flush(self, after: Sequence[bytes] = ()) -> None:
        """Send what the protocol has to say, and then ``after``."""
        try:
            self._push(self.limits.message_s, after)
        except TimeoutError as error:
            raise self._lost("was too slow to take a message") from error
        except OSError as error:
            raise self._lost(f"broke the connection ({error})") from error

    def _linger(self) -> None:
        """Read on for a moment: bytes that nobody has read would take the goodbye away from the other side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            until = time.monotonic() + _LINGER
            self._socket.settimeout(_LINGER)
            while self._socket.recv(_CHUNK) and time.monotonic() < until:
                self._socket.settimeout(max(_AT_ONCE, until - time.monotonic()))

    def _require_open(self) -> None:
        """Raise DisconnectedError, with the reason, unless messages can still be exchanged."""
        if self._protocol.state is State.OPEN:
            return
        theirs, ours = self._protocol.close_rcvd, self._protocol.close_sent
        if theirs is not None:
            lost = self._lost(f"closed the connection ({theirs})")
            raise ClosedError(str(lost)) if theirs.code in _IN_ORDER else lost
        raise self._lost(f"sent what is refused ({ours})" if ours is not None else "ended the connection")

    def _decoded(self, message: bytearray) -> str:
        try:
            return message.decode()
        except UnicodeDecodeError as error:
            raise self._lost("sent a text that is not UTF-8", CloseCode.INVALID_DATA) from error

    def _lost(self, what: str, code: CloseCode = CloseCode.NORMAL_CLOSURE) -> DisconnectedError:
        self.close(code, what)
        return DisconnectedError(f"{self.peer} {what}, so nothing more is exchanged with it; look at its own messages.")


def connect(url: str, limits: Limits, key: ApiKey | None = None) -> Connection:
    """Open ``ws://`` or ``wss://`` (certificates are checked); raises UserError when nobody answers there.

    Without TLS the ``key`` is sent to this machine alone.
    """
    try:
        uri = parse_uri(url)
        protocol = ClientProtocol(uri, max_size=limits.message_bytes, logger=_frames)
    except InvalidURI as error:
        raise UserError(f"{url!r} is no address of a server ({error}); write ws://HOST:PORT.") from error
    if key and not uri.secure and not is_loopback(uri.host):
        raise UserError(
            f"{url} has no TLS, so the API key could be read on the way and is not sent; write wss://, or connect "
            f"without the key (unset {VARIABLE})."
        )
    try:
        sock = socket.create_connection((uri.host, uri.port), timeout=limits.opening_s)
        if uri.secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=uri.host)  # closed if it fails
    except OSError as error:
        raise UserError(
            f"no policy server answers at {url} ({error}), so there is nobody to ask for actions; start it, or correct "
            "the address."
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    connection = Connection(sock, protocol, f"the policy server {url}", limits)
    connection.open(key)
    return connection


class Listener(socketserver.ThreadingTCPServer):
    """Listens on ``port`` (0: any that is free) of ``access.host`` and answers each connection in a thread of its own.

    At most ``max_connections`` are answered at a time; while they have not said what they want, a quarter of that per
    address, so that one stranger who is silent keeps nobody out.  Subclasses define :meth:`serve_connection`.  Raises
    UserError when the port cannot be had.
    """

    daemon_threads, block_on_close = True, False
    allow_reuse_address, request_queue_size = True, 128
    pages: ClassVar[Mapping[str, str]] = {}  # plain HTTP pages by path, for everybody

    def __init__(self, port: int, limits: Limits, max_connections: int, access: Access | None = None) -> None:
        self.limits, self.access = limits, access or Access()
        self._places = threading.BoundedSemaphore(max_connections)
        self._opening: Counter[str] = Counter()  # connections of each address that are not open yet
        self._most_opening, self._lock = max(1, max_connections // 4), threading.Lock()
        self._answering: set[threading.Thread] = set()
        self.address_family = socket.AF_INET6 if ":" in self.access.host else socket.AF_INET
        try:
            super().__init__((self.access.host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be served on ({error}), so nobody could ask for actions; choose another one, or "
                "--port 0 for any that is free."
            ) from error

    @property
    def url(self) -> str:
        """Where clients connect to."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        return f"{self.access.scheme}://{host}:{self.server_address[1]}"

    def serve_connection(self, connection: Connection) -> None:
        """Answer an open connection until it ends; raises DisconnectedError then, or when it is refused."""
        raise NotImplementedError

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a place for another connection."""
        with self._lock:
            strangers = self._opening[client_address[0]] >= self._most_opening
            if not strangers and self._places.acquire(blocking=False):
                self._opening[client_address[0]] += 1
                return True
        log.warning("refused a connection from %s: as many as allowed are open", client_address[0])
        return False

    def server_close(self) -> None:
        """Stop listening, and wait a second for those that are being answered.

        Python would otherwise end while their threads compute, which aborts it in torch's code.
        """
        super().server_close()
        until = time.monotonic() + _FAREWELL
        for thread in tuple(self._answering):
            thread.join(max(0.0, until - time.monotonic()))

    def answer(self, sock: socket.socket, host: str, port: int) -> None:
        """Serve one connection until it ends."""
        peer, connection = f"{host}:{port}", None
        self._answering.add(threading.current_thread())
        try:
            connection = self._open(sock, host, peer)
            if connection is not None:
                log.info("%s connected", peer)
                self.serve_connection(connection)
        except ClosedError:
            log.info("%s left", peer)
        except UserError as error:
            log.warning("%s", error)
        finally:
            if connection is not None:
                connection.close()
            self._places.release()
            self._answering.discard(threading.current_thread())

    def _open(self, sock: socket.socket, host: str, peer: str) -> Connection | None:
        """The connection on ``sock``; None for a request that is no WebSocket or refused, and has been answered."""
        try:
            try:
                sock = self.access.secure(sock, self.limits.opening_s)
            except OSError as error:
                raise UserError(f"{peer} did not agree on TLS ({error}), so it is not answered; use wss://.") from error
            return Connection.accept(sock, peer, self.limits, self.pages, partial(self.access.refusal, host))
        finally:
            with self._lock:
                self._opening[host] -= 1
                self._opening += Counter()  # forgets who has none


class _Handler(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        self.server.answer(self.request, *self.client_address[:2])
