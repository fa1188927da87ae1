"""An environment on another machine: served there by ``vla-rl sims serve``, and reached from here over a socket.

The messages are those of a worker process, with the arrays inside; the server has one such process a connection.  This
machine alone may connect, or whoever has the key, over TLS.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sims.isolated import IsolatedEnv, supervise
from sims.isolation.supervised import Deadlines, LocalWorker, Start
from vla_rl.contract.child import ChildError, error_answer, read_answer
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.task import declare_task
from vla_rl.contract.trust import check_options, read_key
from vla_rl.contract.wire import Arrays, SocketStream, arrays_in, handshake, is_loopback, read_message, write_message

KEY_BYTES = 32  # of its digest, which is what travels
GREETING_S = 10.0  # to present the key
MAX_REQUEST = 1 << 28  # bytes
MAX_SESSIONS = 256
# Seconds of silence before the client's machine is asked whether it is there, between two such questions, and how many.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
# Seconds between two attempts to connect, and after a connection that could not be accepted.
_PAUSE = 0.5
_ANSWER_S = 3600.0  # the client's deadline ends a session before; this bounds one whose client is gone unnoticed


@declare_task(expert="sims.isolated:ExpertInWorker")
def make(
    num_envs: int,
    address: str = "",
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    expert: bool = False,
    key: str = "",
    certificate: str = "",
    deadline_s: float = 120.0,
    start_deadline_s: float = 900.0,
    reconnect_s: float = 60.0,
) -> IsolatedEnv:
    """``num_envs`` environments that the machine at ``address`` ("host:port") serves.

    options           of the served environment, as JSON
    workers           processes there; each has its share of the environments, at most one process for each
    expert            as for ``sims/isolated.py``
    key, certificate  files: the secret that the server knows too, and the certificate it has to show; without them
                      only this machine is connected to
    deadline_s        for a reset, step or snapshot of one worker's share
    start_deadline_s  to connect and to make the environment
    reconnect_s       how long a server that was there is waited for

    Raises UserError when nobody answers there or the environment cannot be made.
    """
    if not address:
        raise UserError(
            "no address was given, so no environment is reached; start vla-rl sims serve NAME on the simulator's "
            "machine and give its address as host:port."
        )
    start = remote_start(address, Security(key, certificate), reconnect_s)
    request = {"env": "remote", "options": dict(options or {}), "expert": expert}
    return supervise(start, num_envs, workers, request, Deadlines(deadline_s, start_deadline_s))


@dataclass(frozen=True)
class Security:
    """Files of one side of a connection.

    key          a file with the secret that both sides share, of at least 16 bytes; "" for none
    certificate  PEM file: the server's own certificate (with ``private_key``), or the one a client trusts
    private_key  PEM file of the server's private key
    """

    key: str = ""
    certificate: str = ""
    private_key: str = ""

    def require_for(self, host: str) -> None:
        """Raise UserError for a key of no use, and unless ``host`` is this machine or there are certificate and key."""
        if not is_loopback(host) and not (self.key and self.certificate):
            raise UserError(
                f"{host!r} is another machine, where anybody could read and steer the simulator, so nothing was "
                "connected; give a certificate and a key file, or use 127.0.0.1."
            )
        for path in filter(None, (self.key, self.private_key)):
            read_key(path)

    def digest(self) -> bytes:
        """What proves that this side knows the key."""
        return hashlib.sha256(read_key(self.key) if self.key else b"").digest()

    def accepts(self, digest: bytes) -> bool:
        """Whether the other side knows the key; takes equally long whatever it sent."""
        return hmac.compare_digest(digest, self.digest())

    def serve(self, connected: socket.socket) -> socket.socket:
        """The server's side of ``connected``, encrypted if there is a certificate."""
        if not self.certificate:
            return connected
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key or None)
        except OSError as error:
            raise UserError(
                f"the certificate {self.certificate!r} cannot be used ({error}), so nobody can connect; give PEM files "
                "of a certificate and its private key."
            ) from error
        return context.wrap_socket(connected, server_side=True)

    def connect(self, connected: socket.socket, host: str) -> socket.socket:
        """The client's side of ``connected``; the server has to prove that it is ``host``."""
        if not self.certificate:
            return connected
        try:
            context = ssl.create_default_context(cadata=Path(self.certificate).read_text())
        except OSError as error:
            raise UserError(
                f"{self.certificate!r} cannot be read ({error}), so nothing was connected; check the file."
            ) from error
        return context.wrap_socket(connected, server_hostname=host)


class RemoteWorker:
    """One connection to ``vla-rl sims serve``, which starts a worker process for it (``Link``)."""

    def __init__(
        self, address: tuple[str, int], security: Security, patience: float, reached: Callable[[], None]
    ) -> None:
        """Connects with the first request, trying again for ``patience`` seconds while nobody listens.

        ``reached`` is called when a server has answered.
        """
        self.address, self._security, self._patience, self._reached = address, security, patience, reached
        self._stream: SocketStream | None = None
        self._words = ""
        self._failure = ""  # why it is of no more use: another connection would be another worker

    @property
    def name(self) -> str:
        return f"the worker at {self.address[0]}:{self.address[1]}"

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        with self._failing():
            stream = self._stream or self._connect(deadline)
            stream.deadline = deadline
            write_message(stream, {**message, "arrays": dict(message["arrays"])})

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        with self._failing():
            assert self._stream is not None
            self._stream.deadline = deadline
            answer = read_message(self._stream)
        if isinstance(answer, dict) and "fate" in answer:
            self._words = str(answer.get("last_words", ""))
            raise ChildError(str(answer["fate"]))
        return read_answer(answer, arrays_in)

    def last_words(self) -> str:
        return self._words

    def kill(self) -> None:
        """Close the connection: the server ends its worker then, whatever that does."""
        self._failure = self._failure or "was closed"
        if self._stream is not None:
            self._stream.close()

    def close(self) -> None:
        self.kill()

    def _connect(self, deadline: float) -> SocketStream:
        host, port = self.address
        end = min(deadline, time.monotonic() + self._patience)
        while True:
            try:
                plain = socket.create_connection((host, port), max(1e-3, deadline - time.monotonic()))
                break
            except OSError:
                if time.monotonic() + _PAUSE > end:
                    raise
            time.sleep(_PAUSE)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = stream = SocketStream(self._security.connect(plain, host))
        except BaseException:
            plain.close()
            raise
        stream.deadline = deadline
        stream.write(self._security.digest())
        handshake(stream, stream, "environment")
        self._reached()
        return stream

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        if self._failure:
            raise ChildError(self._failure)
        try:
            yield
        except TimeoutError as error:
            self._failure = "did not answer in time"
            raise ChildError(self._failure) from error
        except (EOFError, OSError) as error:
            reason = str(error) or "it closed the connection"
            self._failure = f"cannot be reached ({reason}; does vla-rl sims serve run there, with this key?)"
            raise ChildError(self._failure) from error


def remote_start(address: str, security: Security, patience: float) -> Start:
    """Starts workers at ``address``, "host:port"; a server that was there and is not any more is waited for.

    Raises UserError for an address that is none or not secured; ``patience`` in seconds.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise UserError(f"{address!r} is no address, so nothing can be connected; write it as host:port.")
    security.require_for(host)
    reached = threading.Event()
    place = host, int(port)
    return lambda: RemoteWorker(place, security, patience if reached.is_set() else 0.0, reached.set)


class Server:
    """Serves environment ``name`` on ``host``:``port`` until :meth:`close`.

    A client says how many environments it wants and with which options, not which environment.  Options of one that
    makes others (``isolated``, ``randomize``, ``multi_task``, ``gym``) may name code, programs and files: those are
    refused unless the server has --trust.
    """

    def __init__(
        self, name: str, port: int, host: str = "127.0.0.1", security: Security | None = None, python: str = ""
    ) -> None:
        """``port`` 0 chooses a free one.  Raises UserError when it cannot listen there or others could listen in."""
        self.name, self.security, self._python = name, security or Security(), python
        self.security.require_for(host)
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise UserError(
                f"nobody can listen on {host}:{port} ({error}), so {name!r} is not served; choose another port."
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._sessions = threading.BoundedSemaphore(MAX_SESSIONS)
        self._open: set[socket.socket] = set()
        self._closed = False

    def run(self) -> None:
        """Accept connections until :meth:`close`; each has a thread and a worker process of its own."""
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                print(f"a connection could not be accepted: {error}", file=sys.stderr)
                time.sleep(_PAUSE)
                continue
            if not self._sessions.acquire(blocking=False):
                connected.close()
                continue
            self._open.add(connected)
            threading.Thread(target=self._session, args=(connected,), daemon=True).start()

    def close(self) -> None:
        """Stop listening and end every session."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connected in list(self._open):
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _session(self, connected: socket.socket) -> None:
        opened = [connected]
        try:
            connected.settimeout(GREETING_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_silence(connected)
            encrypted = self.security.serve(connected)
            self._open.add(encrypted)
            opened.append(encrypted)
            stream = SocketStream(encrypted)
            with contextlib.closing(stream):
                if self._greet(stream):
                    _relay(stream, self.name, lambda: LocalWorker(self._python))
        except (EOFError, OSError, UserError) as error:
            print(f"a connection ended: {error or type(error).__name__}", file=sys.stderr)
        finally:
            for item in opened:
                self._open.discard(item)
                item.close()
            self._sessions.release()

    def _greet(self, stream: SocketStream) -> bool:
        """Whether the other side knows the key; nothing else is read before."""
        stream.deadline = time.monotonic() + GREETING_S
        digest = b""
        while len(digest) < KEY_BYTES:
            piece = stream.read(KEY_BYTES - len(digest))
            if not piece:
                return False
            digest += piece
        if not self.security.accepts(digest):
            print("a connection without the key was refused", file=sys.stderr)
            return False
        handshake(stream, stream, f"server of {self.name}")
        return True


def _notice_silence(connected: socket.socket) -> None:
    """End the connection of a client whose machine is gone without a word, within minutes, also between requests."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _relay(stream: SocketStream, name: str, start: Callable[[], LocalWorker]) -> None:
    """Pass requests to a worker and its answers back, until one of the three is gone."""
    worker = start()
    try:
        while True:
            stream.deadline = None
            message = read_message(stream, MAX_REQUEST)
            try:
                request = _request(message, name)
            except UserError as error:
                write_message(stream, error_answer(error, "the server"))
                return
            request["arrays"] = arrays_in(request.get("arrays", {}))
            try:
                worker.send(request, time.monotonic() + _ANSWER_S)
                if not _answers(worker, stream):
                    return
                answer, found = worker.receive(time.monotonic() + _ANSWER_S)
            except ChildError as error:
                write_message(stream, {"fate": str(error), "last_words": worker.last_words()})
                return
            write_message(stream, {**answer, "arrays": found})
    finally:
        worker.kill()
        worker.close()


def _request(message: Any, name: str) -> dict[str, Any]:
    """The fields of a request; the environment is the served one, and the process is the server's own affair."""
    if not isinstance(message, dict):
        raise ContractError(f"a client sent a {type(message).__name__} for a request, so its session ended.")
    fields = {key: item for key, item in message.items() if key != "memory"}
    if fields.get("do") == "make" and ":" not in name:  # the user's own environment knows what its options mean
        check_options(fields.get("options"), "a client")
    return {**fields, "env": name} if fields.get("do") == "make" else fields


def _answers(worker: LocalWorker, stream: SocketStream) -> bool:
    """Wait until the worker has something to say; False when the client has gone meanwhile."""
    poll = select.poll()
    poll.register(worker.fileno(), select.POLLIN)
    poll.register(stream.socket, select.POLLIN)
    return stream.socket.fileno() not in [end for end, _ in poll.poll(1000 * _ANSWER_S)]
