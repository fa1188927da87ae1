"""Who may reach a policy server: this machine alone, or whoever has the API key, over TLS."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.trust import read_key
from vla_rl.contract.wire import is_loopback

log = logging.getLogger("vla_rl.serving")
Refusal = tuple[HTTPStatus, str]  # of an opening request: the answer's status and text
_WRONG, _WINDOW_S, _ADDRESSES = 10, 60.0, 1024  # wrong keys of one address in a window; addresses that are remembered
Protocol = Literal["openpi", "vla-eval"]
_SCHEMES: dict[str, tuple[Protocol, str]] = {
    "ws": ("openpi", "ws"),
    "wss": ("openpi", "wss"),
    "vla-eval+ws": ("vla-eval", "ws"),
    "vla-eval+wss": ("vla-eval", "wss"),
}
VARIABLE = "VLA_RL_API_KEY"
_FORM = re.compile(r"[!-~]{16,1024}")  # what a header carries unchanged, and nobody guesses
_SCHEME = "Api-Key "


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


def names_server(name: object) -> bool:
    """Whether ``name`` is the address of a policy server and no checkpoint."""
    return str(name).partition("://")[0] in _SCHEMES and "://" in str(name)


@dataclass(frozen=True)
class Address:
    """Where a policy server is and how it is asked.

    ``ws://HOST:PORT`` (or ``wss``) is a server of openpi, ``vla-eval+ws://HOST:PORT`` a model server of the vla-eval
    harness; ``?replan_steps=5&layout=module:function&answer_s=60`` sets the rest.
    """

    protocol: Protocol
    url: str
    replan_steps: int = 0  # actions of every chunk that are executed; 0: all that the environment takes at once
    layout: str = ""  # "module:function" from a SingleObservation to a request; "": the protocol's usual keys
    answer_s: float = 120.0  # how long an answer may take; the first one often compiles the model
    key_file: str = ""  # holds the server's API key; "": the environment variable VLA_RL_API_KEY, if it is set

    @classmethod
    def parse(cls, name: str) -> Address:
        """The address that a user wrote; raises UserError for one that cannot be used."""
        parts = urlsplit(name)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UserError(
                f"{name!r} is no address of a policy server, so nobody can be asked for actions; write "
                "ws://HOST:PORT or vla-eval+ws://HOST:PORT."
            )
        protocol, scheme = _SCHEMES[parts.scheme]
        read: Mapping[str, Callable[[str], object]]
        read = {"replan_steps": int, "layout": str, "answer_s": float, "key_file": str}
        options: dict[str, object] = {}
        for option, text in parse_qsl(parts.query, keep_blank_values=True):
            if option not in read:
                raise UserError(
                    f"the address {name!r} has an option {option!r}, which has no meaning; {did_you_mean(option, read)}"
                )
            try:
                options[option] = read[option](text)
            except ValueError as error:
                raise UserError(f"{option} of the address {name!r} is {text!r}; write a number.") from error
        return cls(protocol, urlunsplit((scheme, parts.netloc, parts.path, "", "")), **options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        if self.replan_steps < 0 or not 0 < self.answer_s < math.inf:
            raise UserError(
                f"replan_steps={self.replan_steps} and answer_s={self.answer_s} have no meaning; execute at least one "
                "action of a chunk, and wait for a positive time."
            )


@dataclass(frozen=True)
class ApiKey:
    """A key, which is never printed."""

    _text: str = field(repr=False)

    def header(self) -> str:
        """The value of a request's Authorization."""
        return _SCHEME + self._text

    def matches(self, header: str) -> bool:
        """Whether ``header`` is that value; takes equally long whatever it is."""
        wanted, found = (
            hashlib.sha256(text.encode(errors="surrogateescape")).digest() for text in (self.header(), header)
        )
        return hmac.compare_digest(wanted, found)


def find_api_key(path: str) -> ApiKey | None:
    """The key in the file ``path`` or, with "", in the environment variable ``VLA_RL_API_KEY``; None when neither is.

    Raises UserError for a file that :func:`read_key` refuses, and for what is too short or has blanks inside; so an
    empty variable is no missing one.
    """
    if not path and VARIABLE not in os.environ:
        return None
    text = read_key(path).decode("latin-1") if path else os.environ[VARIABLE].strip()
    if not _FORM.fullmatch(text):
        where = f"the file {path!r}" if path else f"the environment variable {VARIABLE}"
        raise UserError(
            f"{where} holds no API key of 16 to 1024 visible ASCII characters, so it could be guessed or not be sent; "
            f"make one, for example with: openssl rand -hex 32{'' if path else ', or unset it'}."
        )
    return ApiKey(text)
