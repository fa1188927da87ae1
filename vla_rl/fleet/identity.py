"""Who is at the other end: TLS certificates (X.509) that name a robot or a server, and the list of revoked ones.

The robot's name is in the certificate as the URI ``urn:vla-rl:robot:NAME`` (a subject alternative name), so that what
a message says about its sender need not be believed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_key
from vla_rl.contract.wire import is_loopback

Role = Literal["robot", "server"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_URI = "urn:vla-rl:{}:{}"


class RefusedError(UserError):
    """A certificate that is valid for TLS, but not for this."""


@dataclass(frozen=True)
class Credentials:
    """What one side shows (its certificate and private key) and whom it believes (the authority); all PEM."""

    name: str  # of the robot; of a server, the first host
    role: Role
    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)
    expires: datetime


def now() -> datetime:
    """The present, with its time zone."""
    return datetime.now(UTC)


def load_credentials(folder: Path, role: Role, clock: Callable[[], datetime] = now) -> Credentials:
    """The ``ca.pem``, ``robot.pem`` and ``robot.key`` (or ``server...``) of a folder that ``vla-rl certs`` made.

    Raises UserError for files that are missing, broken, expired, of another role or of another authority, for a key
    that does not belong to the certificate, and for one that other users of this machine can read.
    """
    key_file = folder / f"{role}.key"
    check_folder(folder)
    try:
        parts = [(folder / name).read_bytes() for name in ("ca.pem", f"{role}.pem", key_file.name)]
    except OSError as error:
        raise UserError(
            f"{folder} holds no credentials of a {role} ({error.strerror}: {error.filename}), so nobody would believe "
            f"it; make them with: {_COMMANDS[role]}."
        ) from error
    read_key(key_file)
    try:
        authority, certificate = (x509.load_pem_x509_certificate(part) for part in parts[:2])
        key = load_pem_private_key(parts[2], None)
        certificate.verify_directly_issued_by(authority)
    except Exception as error:  # cryptography has a dozen types for what is wrong with a file
        raise UserError(
            f"{folder} holds no usable credentials of a {role} ({error or type(error).__name__}), so nobody would "
            f"believe it; make them again with: {_COMMANDS[role]}."
        ) from error
    spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*spki) != certificate.public_key().public_bytes(*spki):
        raise UserError(
            f"{key_file} does not belong to {role}.pem beside it, so no connection would come about; copy both files "
            "from the same folder."
        )
    name, expires = _checked(certificate, role, clock()), certificate.not_valid_after_utc
    return Credentials(name, role, parts[0], parts[1], parts[2], expires)


def robot_of(certificate: bytes, revoked: Revoked, clock: Callable[[], datetime] = now) -> str:
    """The robot that ``certificate`` (PEM) names; TLS has made sure of its authority.

    Raises RefusedError when it has been revoked, has expired or is not a robot's.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise RefusedError(f"a certificate cannot be read ({error}), so its owner is refused; make another.") from error
    name = _checked(read, "robot", clock())
    if read.serial_number in revoked:
        raise RefusedError(
            f"the certificate of robot {name!r} has been revoked, so it is refused; make another with: "
            f"{_COMMANDS['robot']}."
        )
    return name


def check_reach(host: str, credentials: Credentials | None) -> None:
    """Raise UserError for an address of other machines without certificates; they are optional on this one."""
    if credentials is None and not is_loopback(host):
        raise UserError(
            f"{host!r} leads to other machines, where anybody could read what robots see and pretend to be one, so "
            f"nothing is started; make certificates with: {_COMMANDS['server']}, or use 127.0.0.1."
        )


class Revoked:
    """The serial numbers in a file, one a line before any blank, read again when it changes; ``path`` None: none.

    Nobody who was revoked once is let in again.  Raises UserError, as ``in`` does, for a file that is missing or cannot
    be read, so that a broken list lets nobody in.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._read: tuple[int, int, int] | None = None
        self._serials: frozenset[int] = frozenset()
        _ = 0 in self

    def __contains__(self, serial: int) -> bool:
        with self._lock:
            if self._path is not None:
                self._refresh(self._path)
            return serial in self._serials

    def _refresh(self, path: Path) -> None:
        try:
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if state != self._read:
                lines = path.read_text(encoding="ascii").splitlines()
                # Never fewer: somebody may be writing the file anew, and half of it is there.
                self._serials |= frozenset(int(line.split()[0], 16) for line in lines if line.strip())
                self._read = state
        except (OSError, ValueError) as error:
            raise UserError(
                f"the list of revoked certificates {path} cannot be read ({error}), so no robot is let in; restore "
                "it, from the folder in which it was revoked."
            ) from error


def uri(role: Role, name: str) -> str:
    """What a certificate of ``role`` says of its owner."""
    return _URI.format(role, name)


def _checked(certificate: x509.Certificate, role: Role, at: datetime) -> str:
    """The name that ``certificate`` gives a ``role``; raises RefusedError for another role or time."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    start = uri(role, "")
    owner = [text.removeprefix(start) for text in uris if text.startswith(start)]
    if len(owner) != 1 or not NAME.fullmatch(owner[0]):
        raise RefusedError(
            f"a certificate is of {', '.join(uris)[:200] or 'nobody'} and of no {role}, so its owner is refused; make "
            f"one with: {_COMMANDS[role]}."
        )
    if not certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc:
        raise RefusedError(
            f"the certificate of {role} {owner[0]!r} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} "
            f"to {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC only, so its owner is refused; set the clock of "
            f"this machine, or make another with: {_COMMANDS[role]}."
        )
    return owner[0]


_COMMANDS: dict[Role, str] = {
    "robot": "vla-rl certs robot FOLDER NAME",
    "server": "vla-rl certs init FOLDER --host ADDRESS",
}
