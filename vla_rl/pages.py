"""Pages: templates that escape whatever they are given, and the server of the pages that live.

On this machine's own address nobody is asked for a token, and only the names localhost and 127.0.0.1 are answered to
(another site's name that is made to point here is refused: DNS rebinding), for pages of this server alone.  Any other
address needs TLS and a token, as ``Authorization: Bearer TOKEN`` or ``?token=TOKEN``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import is_loopback

CONNECTIONS = 64  # that are served at a time
PATIENCE_S = 10.0  # until a client that says or takes nothing is let go
_LONGEST = 200  # bytes of what is posted
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
Answer: TypeAlias = tuple[str, bytes | Iterator[bytes]]  # content type and body, or the parts of a stream


def render(template: str, title: str, nonce: str = "", **values: Any) -> str:
    """The page of a template in ``vla_rl/templates``; ``nonce`` as :class:`PageServer` gives it, "" for a file."""
    return templates().get_template(template).render(title=title, nonce=nonce, **values)


@cache
def templates() -> Environment:
    """Values are escaped, and one that is missing is an error; ``inline`` knows ``**bold**`` and `` `code` ``."""
    made = Environment(
        loader=PackageLoader("vla_rl"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["inline"] = inline
    return made


def inline(text: str) -> Markup:
    """``text`` with ``**bold**`` and `` `code` `` as markup."""
    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", code))


@dataclass(frozen=True)
class PageAddress:
    """Where a page is served; raises UserError for an address that others reach without TLS and a token."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not (self.token and self.tls):
            raise UserError(
                f"{self.host} is reached by other machines and the page would have no token or no TLS, so it is not "
                "served; give both, or serve it on 127.0.0.1."
            )

    def admits(self, token: str) -> bool:
        """Whether ``token`` is the right one; takes equally long whatever it is."""
        wanted, found = (hashlib.sha256(text.encode(errors="replace")).digest() for text in (self.token, token))
        return not self.token or hmac.compare_digest(wanted, found)


class PageServer(ThreadingHTTPServer):
    """A page at ``/``, what it reads, and what it may do.

    page     the HTML, of a nonce that its styles and scripts must have
    reads    {path: what a GET answers}
    does     {path: what a POST of a JSON object does and answers}; a UserError is answered with its sentence
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: PageAddress,
        page: Callable[[str], str],
        reads: Mapping[str, Callable[[], Answer]],
        does: Mapping[str, Callable[[JsonObject], Answer]] | None = None,
    ) -> None:
        """Raises UserError when the port is taken or forbidden."""
        self.address, self.page, self.reads, self.does = address, page, reads, does or {}
        self.ending = threading.Event()
        self.places = threading.BoundedSemaphore(CONNECTIONS)
        self._thread: threading.Thread | None = None
        try:
            super().__init__((address.host, address.port), _Handler)
        except (OSError, OverflowError) as error:
            port, why = address.port, getattr(error, "strerror", None) or "there is no such port"
            raise UserError(
                f"port {port} of {address.host} cannot be served on ({why}), so there would be no page; choose another "
                f"one, for example {port + 1 if 1023 < port < 65535 else 8001}, or 0 for any that is free."
            ) from error

    def start(self) -> PageServer:
        """Serve from a thread of its own until :meth:`close`."""
        self._thread = threading.Thread(target=self.serve_forever, name="page", daemon=True)
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        """What to open in a browser, token included."""
        scheme = "https" if self.address.tls else "http"
        token = f"?token={self.address.token}" if self.address.token else ""
        return f"{scheme}://{self.address.host}:{self.server_port}/{token}"

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept; the TLS handshake waits for the connection's own thread, so that a silent client blocks nobody."""
        sock, address = super().get_request()
        if self.address.tls is not None:
            sock = self.address.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """A thread for the connection, or its end where all places are taken."""
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread for it now
            self.places.release(1)
            raise

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Serve one connection, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is no news."""

    def close(self) -> None:
        self.ending.set()
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE_S
    server_version, sys_version = "vla-rl", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._admitted():
            return
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            self._answer(("text/html; charset=utf-8", self.server.page(nonce).encode()), nonce=nonce)
        elif path in self.server.reads:
            self._answer(self.server.reads[path]())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {path!r}; see /.")

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if not self._admitted():
            return
        if path not in self.server.does:
            self._refuse(HTTPStatus.NOT_FOUND, f"nothing can be done at {path!r}.")
        elif self.headers.get_content_type() != "application/json":  # what other sites can send unasked is never this
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "what is posted is application/json.")
        elif not (length := self.headers.get("Content-Length", "")).isdecimal() or int(length) > _LONGEST:
            self._refuse(HTTPStatus.BAD_REQUEST, f"what is posted comes with its length, at most {_LONGEST} bytes.")
        else:
            try:
                given = json.loads(self.rfile.read(int(length)))
                answer = self.server.does[path](given if isinstance(given, dict) else {})
            except (ValueError, UserError) as error:
                self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            else:
                self._answer(answer)

    def _admitted(self) -> bool:
        """Whether it was asked by a name that nobody else can give it, by no other site's page, and with the token."""
        host, address = self.headers.get("Host", ""), self.server.address
        origins = (f"{scheme}://{host}" for scheme in ("http", "https"))
        known = bool(address.token) or _LOCAL.fullmatch(host) is not None
        if not known or self.headers.get("Origin", f"http://{host}") not in origins:
            self._refuse(HTTPStatus.FORBIDDEN, "only a page of this machine, as localhost or 127.0.0.1, is answered.")
        elif not address.admits(self._token()):
            self._refuse(HTTPStatus.UNAUTHORIZED, "a token is needed.")
        else:
            return True
        return False

    def _token(self) -> str:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else parse_qs(urlsplit(self.path).query).get("token", [""])[0]

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.close_connection = True  # a body that was not read must not be taken for the next request
        self._answer(("text/plain; charset=utf-8", sentence.encode()), status)

    def _answer(self, answer: Answer, status: HTTPStatus = HTTPStatus.OK, nonce: str = "") -> None:
        kind, body = answer
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        own = f"style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
        headers["Content-Security-Policy"] = (
            f"default-src 'none'; {own}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        if isinstance(body, bytes):
            headers["Content-Length"] = str(len(body))
        else:
            self.close_connection = True  # a stream has no length
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for part in (body,) if isinstance(body, bytes) else body:
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Who looks at a page is not written down: the token would be."""
