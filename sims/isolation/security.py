"""Who may reach a simulator over the network: this machine alone, or whoever has the key, over TLS."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_key
from vla_rl.contract.wire import is_loopback

KEY_BYTES = 32  # of its digest, which is what travels


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
        context = ssl.create_default_context(cadata=_read(self.certificate).decode())
        return context.wrap_socket(connected, server_hostname=host)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path!r} cannot be read ({error}), so nothing was connected; check the file.") from error
