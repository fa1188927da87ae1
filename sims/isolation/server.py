"""``vla-rl sims serve``: an environment of this machine for learners on others, one worker process a connection."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sims.isolation.channel import InMessages
from sims.isolation.links import LocalWorker
from sims.isolation.security import KEY_BYTES, Security
from vla_rl.contract.child import ChildError, error_answer
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import check_options
from vla_rl.contract.wire import SocketStream, handshake, read_message, write_message

GREETING_S = 10.0  # to present the key
MAX_REQUEST = 1 << 28  # bytes
MAX_SESSIONS = 256
# Seconds of silence before the client's machine is asked whether it is there, between two such questions, and how many.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
_PAUSE = 0.5  # seconds after a connection that could not be accepted, as when too many files are open
_ANSWER_S = 3600.0  # the client's deadline ends a session before; this bounds one whose client is gone unnoticed


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
    channel, worker = InMessages(), start()
    try:
        while True:
            stream.deadline = None
            message = read_message(stream, MAX_REQUEST)
            try:
                request = _request(message, name)
            except UserError as error:
                write_message(stream, error_answer(error, "the server"))
                return
            arrays = channel.get(request.pop("arrays", {}))
            try:
                worker.send(request, arrays, time.monotonic() + _ANSWER_S)
                if not _answers(worker, stream):
                    return
                answer, found = worker.receive(time.monotonic() + _ANSWER_S)
            except ChildError as error:
                write_message(stream, {"fate": str(error), "last_words": worker.last_words()})
                return
            write_message(stream, {**answer, "arrays": channel.put(found)})
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
