"""Listens for WebSockets, and refuses what no protocol has to know about.

These are other machines (without TLS and the API key), web pages (a request with an Origin), messages that are
oversized, malformed or slow, and connections beyond a number.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from vla_rl.contract.errors import UserError
from vla_rl.serving.access import Access
from vla_rl.serving.websocket import ClosedError, Connection, Limits, accept

log = logging.getLogger("vla_rl.serving")
LIMITS = Limits()
_FAREWELL = 1.0  # seconds that open connections have in all when the server is closed


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
            return accept(sock, peer, self.limits, self.pages, partial(self.access.refusal, host))
        finally:
            with self._lock:
                self._opening[host] -= 1
                self._opening += Counter()  # forgets who has none


class _Handler(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        self.server.answer(self.request, *self.client_address[:2])
