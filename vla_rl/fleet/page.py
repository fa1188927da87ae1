"""The fleet's page, served by the server itself: live, read-only, and without a network beside its own.

``/`` is the page, ``/events`` its stream (server-sent events), ``/status`` the same once as JSON, ``/metrics`` for
Prometheus.  On this machine's own address nobody is asked for a token, and only the names localhost and 127.0.0.1 are
answered to (another site's name that is made to point here is refused: DNS rebinding).  Any other address needs TLS and
a token, as ``Authorization: Bearer TOKEN`` or ``?token=TOKEN``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import is_loopback
from vla_rl.fleet.status import Status

CONNECTIONS = 64  # that are served at a time
PATIENCE_S = 10.0  # until a client that says or takes nothing is let go
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_NONCE = "NONCE"  # in page.html, replaced at every answer


@dataclass(frozen=True)
class PageAddress:
    """Where the page is served; raises UserError for an address that others reach without TLS and a token."""

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
    """Serves the page of ``status`` from a thread of its own until :meth:`close`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, status: Status, address: PageAddress) -> None:
        """Raises UserError when the port is taken or forbidden."""
        self.status, self.address = status, address
        self.ending = threading.Event()
        self.places = threading.BoundedSemaphore(CONNECTIONS)
        self.html = files("vla_rl.fleet").joinpath("page.html").read_text(encoding="utf-8")
        try:
            super().__init__((address.host, address.port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"the page cannot be served on {address.host}:{address.port} ({error}), so there would be none; choose "
                "another port, or 0 for any that is free."
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, name="page", daemon=True)
        self._thread.start()

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
        """End the page; safe to call twice."""
        self.ending.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = PATIENCE_S
    server_version, sys_version = "vla-rl", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answers = {"/": self._page, "/events": self._events, "/status": self._status, "/metrics": self._metrics}
        if not self._local_name():
            self._answer("text/plain", b"This name is not served.", HTTPStatus.FORBIDDEN)
        elif not self.server.address.admits(self._token(url.query)):
            self._answer("text/plain", b"A token is needed.", HTTPStatus.UNAUTHORIZED)
        elif url.path not in answers:
            self._answer("text/plain", b"There is nothing here.", HTTPStatus.NOT_FOUND)
        else:
            answers[url.path]()

    def _local_name(self) -> bool:
        """Whether the page is asked for by a name that nobody else can give it, or a token protects it."""
        name = self.headers.get("Host", "").rsplit(":", 1)[0]
        return bool(self.server.address.token) or name in _LOCAL

    def _token(self, query: str) -> str:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else parse_qs(query).get("token", [""])[0]

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'"
        body = self.server.html.replace(_NONCE, nonce).encode()
        self._answer("text/html; charset=utf-8", body, more={"Content-Security-Policy": policy})

    def _status(self) -> None:
        self._answer("application/json", json.dumps(self.server.status.snapshot()).encode())

    def _metrics(self) -> None:
        self._answer("text/plain; version=0.0.4; charset=utf-8", metrics(self.server.status))

    def _events(self) -> None:
        self._head("text/event-stream", {})
        while not self.server.ending.is_set():
            self.wfile.write(f"data: {json.dumps(self.server.status.snapshot())}\n\n".encode())
            self.server.ending.wait(1.0)

    def _answer(
        self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK, more: dict[str, str] | None = None
    ) -> None:
        self._head(kind, {"Content-Length": str(len(body)), **(more or {})}, status)
        self.wfile.write(body)

    def _head(self, kind: str, more: dict[str, str], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        common = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in (common | {"Referrer-Policy": "no-referrer"} | more).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Who looks at the page is not written down: the token would be."""


_OF_ROBOTS = {
    "records": "records that are durable on the server",
    "bytes": "bytes of durable records",
    "dropped": "records that the robot gave up because its disk was full",
    "episodes": "whole episodes",
    "successes": "episodes that succeeded",
    "steps": "control steps of whole episodes",
    "intervened": "control steps that a person chose",
    "clipped": "control steps whose request the supervisor changed",
}
_OF_VERSIONS = {"episodes": "whole episodes", "successes": "episodes that succeeded"}
_STATES = ("staged", "canary", "active", "retired")


class _Collector:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Every family, read from one snapshot."""
        seen = self._status.snapshot()
        yield CounterMetricFamily("vla_rl_fleet_alarms", "alarms since the server began", value=seen["alarmed"])
        for name in ("updates", "episodes"):
            if name in seen["learner"]:
                what = f"{name} of the learner, also of its runs before"
                yield GaugeMetricFamily(f"vla_rl_fleet_learner_{name}", what, value=seen["learner"][name])
        robots, versions = seen["robots"], seen["versions"]
        yield _gauge("connected", "1 while the robot is connected", "robot", robots)
        yield _gauge("waiting", "records that the robot holds and the server does not", "robot", robots)
        yield _gauge("version", "version of the policy that the robot used last", "robot", robots)
        for name, what in _OF_ROBOTS.items():
            yield _counter(f"robot_{name}", what, "robot", robots, name)
        for name, what in _OF_VERSIONS.items():
            yield _counter(f"version_{name}", what, "version", versions, name)
        labels = ("version", "state")
        state = GaugeMetricFamily("vla_rl_fleet_version_state", "1 for the state that it is in", labels=labels)
        for version, one in versions.items():
            for name in _STATES:
                state.add_metric((version, name), float(one["state"] == name))
        yield state


def metrics(status: Status) -> bytes:
    """The present metrics of ``status``, as Prometheus scrapes them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))  # a collector is what has collect()
    text: bytes = generate_latest(registry)
    return text


def _gauge(name: str, what: str, label: str, of: dict[str, dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(f"vla_rl_fleet_{name}", what, labels=(label,))
    for key, one in of.items():
        family.add_metric((key,), float(one[name]))
    return family


def _counter(name: str, what: str, label: str, of: dict[str, dict[str, Any]], field: str) -> Metric:
    family = CounterMetricFamily(f"vla_rl_fleet_{name}", what, labels=(label,))
    for key, one in of.items():
        family.add_metric((key,), float(one[field]))
    return family
