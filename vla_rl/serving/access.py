"""Who may reach a policy server: this machine alone, or whoever has the API key, over TLS."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_key
from vla_rl.contract.wire import is_loopback
from vla_rl.serving.address import VARIABLE, ApiKey
from vla_rl.serving.websocket import Refusal

log = logging.getLogger("vla_rl.serving")
_WRONG, _WINDOW_S, _ADDRESSES = 10, 60.0, 1024  # wrong keys of one address in a window; addresses that are remembered


class Access:
    """Listening on ``host`` with a certificate, its private key (PEM files; "" if the first holds both) and an API key.

    Raises UserError when another machine could reach ``host`` and TLS or the key lacks, or when a file cannot be used.
    After 10 wrong keys within a minute an address is refused, even with the right key, until the minute is over; open
    connections stay open.  ``clock`` counts seconds.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        certificate: str = "",
        private_key: str = "",
        key: ApiKey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not is_loopback(host) and not (certificate and key):
            raise UserError(
                f"{host!r} is reached by other machines, where anybody could read what the robot sees and steer it, so "
                f"nothing is served; give --tls-cert, --tls-key and an API key (--api-key-file or {VARIABLE}), or use "
                "127.0.0.1 and ssh -L."
            )
        self.host, self._key, self._clock = host, key, clock
        self._tls = _context(certificate, private_key) if certificate or private_key else None
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()  # when each address sent one
        self._lock = threading.Lock()

    @property
    def scheme(self) -> str:
        """Of the server's address."""
        return "wss" if self._tls else "ws"

    def secure(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        """The server's side of ``sock``, encrypted if there is a certificate; raises OSError within ``timeout_s``."""
        if self._tls is None:
            return sock
        sock.settimeout(timeout_s)
        return self._tls.wrap_socket(sock, server_side=True)

    def refusal(self, address: str, header: str) -> Refusal | None:
        """Why a request from ``address`` with this Authorization ("" for none) is refused; None if it is not."""
        if self._key is None:
            return None
        network, now = _network(address), self._clock()
        with self._lock:
            wrong = self._wrong.get(network, deque())
            while wrong and wrong[0] <= now - _WINDOW_S:
                wrong.popleft()
            if len(wrong) >= _WRONG:
                return HTTPStatus.TOO_MANY_REQUESTS, "too many wrong API keys from this address; wait a minute.\n"
            if self._key.matches(header):
                return None
            wrong.append(now)
            self._wrong[network] = wrong
            self._wrong.move_to_end(network)
            if len(self._wrong) > _ADDRESSES:
                self._wrong.popitem(last=False)
        log.warning("refused %s: %s", address, "a wrong API key" if header else "no API key")
        if len(wrong) == _WRONG:
            log.warning("refused for a minute, with whatever key: %s", network)
        return HTTPStatus.UNAUTHORIZED, "this policy server wants its API key: Authorization: Api-Key KEY.\n"


def _network(address: str) -> str:
    """What is counted as one: an IPv4 address, or the /64 of an IPv6 address, of which everybody has many."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address) or ip.ipv4_mapped:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, 64), strict=False))


def _context(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # they reach a client of websockets in one thread while it writes in another, which is lost
    try:
        context.load_cert_chain(certificate, private_key or None, password=_no_password)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the certificate {certificate!r} cannot be used with the private key {private_key!r} ({error}), so nobody "
            "could connect; give PEM files that belong together, the key without a password."
        ) from error
    read_key(private_key or certificate)  # which nobody else may
    return context


def _no_password() -> str:
    raise ValueError("the private key has a password")
