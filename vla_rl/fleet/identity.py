"""Who is at the other end: TLS certificates (X.509) that name a robot or a server, and the list of revoked ones.

The robot's name is in the certificate as the URI ``urn:vla-rl:robot:NAME`` (a subject alternative name), so that what
a message says about its sender need not be believed.

A fleet has an authority of its own, and a certificate for its server and each robot (ECDSA P-256, X.509 v3; TLS in gRPC
takes no Ed25519).  The Ed25519 pair that signs policy manifests is made here too.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_bytes, read_key, sync, write_whole
from vla_rl.contract.wire import is_loopback
from vla_rl.fleet.record import NAME

Role = Literal["robot", "server"]
_URI = "urn:vla-rl:{}:{}"
_COMMANDS: dict[Role, str] = {
    "robot": "vla-rl certs robot FOLDER NAME",
    "server": "vla-rl certs init FOLDER --host ADDRESS",
}
_BACKDATED = timedelta(minutes=5)  # clocks of robots may be behind
_RENEWAL = timedelta(days=30)  # how long before its end a certificate may have a successor
_AUTHORITY_DAYS = 3650
_SERIAL = 40  # hexadecimal digits at most
_HERE = ("localhost", "127.0.0.1", "::1")


class CertificateError(UserError):
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

    Raises CertificateError when it has been revoked, has expired or is not a robot's.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise CertificateError(
            f"a certificate cannot be read ({error}), so its owner is refused; make another."
        ) from error
    name = _checked(read, "robot", clock())
    if read.serial_number in revoked:
        raise CertificateError(
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


def _checked(certificate: x509.Certificate, role: Role, at: datetime) -> str:
    """The name that ``certificate`` gives a ``role``; raises CertificateError for another role or time."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    start = _URI.format(role, "")
    owner = [text.removeprefix(start) for text in uris if text.startswith(start)]
    if len(owner) != 1 or not NAME.fullmatch(owner[0]):
        raise CertificateError(
            f"a certificate is of {', '.join(uris)[:200] or 'nobody'} and of no {role}, so its owner is refused; make "
            f"one with: {_COMMANDS[role]}."
        )
    if not certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc:
        raise CertificateError(
            f"the certificate of {role} {owner[0]!r} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} "
            f"to {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC only, so its owner is refused; set the clock of "
            f"this machine, or make another with: {_COMMANDS[role]}."
        )
    return owner[0]


@dataclass(frozen=True)
class Issued:
    """A certificate that the authority has made."""

    role: Role
    name: str
    serial: int
    expires: datetime
    revoked: bool


class Authority:
    """The folder of a fleet's certificates; made by :meth:`create`.

    ``authority/`` stays where it is, ``server/`` goes to the server's machine and ``robots/NAME/`` to that robot.
    ``at`` is the present.  Killed at any moment, it lets in nobody who was revoked.
    """

    def __init__(self, folder: Path, at: datetime | None = None) -> None:
        """Raises UserError when there is no authority in ``folder``."""
        self.folder, self._at = folder, at or now()
        try:
            check_folder(folder)
            self._certificate = x509.load_pem_x509_certificate((folder / "authority/ca.pem").read_bytes())
            key = load_pem_private_key(read_key(folder / "authority/ca.key"), None)
            if not isinstance(key, EllipticCurvePrivateKey):
                raise ValueError("its key is of another kind")
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"{folder} holds no authority for certificates ({error}), so none can be made or revoked; make one "
                f"with: vla-rl certs init {folder}."
            ) from error
        self._key, self._log, self._revoked = key, folder / "authority/issued.txt", folder / "server/revoked.txt"

    @classmethod
    def create(cls, folder: Path, hosts: Sequence[str] = (), days: int = 365, at: datetime | None = None) -> Authority:
        """A new authority and the credentials of a server at ``hosts`` (names or addresses; this machine always).

        Raises UserError when ``folder`` has one, which robots in use believe.
        """
        key, name = generate_private_key(SECP256R1()), _named("vla-rl fleet")
        start = at or now()
        certificate = (
            _builder(name, name, key, start, _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, SHA256())
        )
        signing = Ed25519PrivateKey.generate()
        files = {
            "ca.pem": certificate.public_bytes(Encoding.PEM),
            "ca.key": _private(key),
            "signing.key": _private(signing),
            "signing.pub": signing.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        }
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)
        with _alone(folder):
            if (folder / "authority").exists():
                raise UserError(
                    f"{folder} has an authority already, which robots in use believe, so it is left as it is; choose "
                    "another folder, or remove this one."
                )
            _write_folder(folder / "authority", files)
        made = cls(folder, start)
        made.server(hosts, days)
        return made

    def server(self, hosts: Sequence[str] = (), days: int = 365) -> Path:
        """The folder with the credentials of the server, made anew; robots find it at ``hosts`` and on its own machine.

        The key that signs manifests and the list of revoked certificates stay as they are.
        """
        folder = self.folder / "server"
        kept = {"signing.key": (self.folder / "authority/signing.key").read_bytes()}
        with _alone(self.folder):
            if not self._revoked.exists():
                self._check_revoked(_of_robots(self._lines()))
                kept["revoked.txt"] = b""
            made = self._issue("server", "server", days, tuple(dict.fromkeys((*hosts, *_HERE))))
            _write_folder(folder, {**made, **kept})
        return folder

    def robot(self, name: str, days: int = 365) -> Path:
        """The folder with the credentials of robot ``name``, made anew.

        Raises UserError for a name that cannot be one, and while another certificate of that name is valid for more
        than 30 days and not revoked: two robots of one name would be taken for one.
        """
        if not NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot be a robot's name, so it gets no certificate; use up to 64 letters, digits, dots, "
                "hyphens and underscores, a letter or digit first."
            )
        folder = self.folder / "robots" / name
        public = (self.folder / "authority/signing.pub").read_bytes()
        with _alone(self.folder):
            self._check_revoked(not self._revoked.exists())
            self._check_successor(name)
            _write_folder(folder, {**self._issue("robot", name, days, ()), "signing.pub": public})
        return folder

    def revoke(self, name: str) -> int:
        """Revoke every valid certificate of robot ``name`` and return how many; raises UserError when there is none."""
        with _alone(self.folder):
            found = [one for one in self.issued() if (one.role, one.name, one.revoked) == ("robot", name, False)]
            if not found:
                raise UserError(
                    f"robot {name!r} has no certificate that could be revoked, so nothing is done; vla-rl certs list "
                    f"{self.folder} prints all."
                )
            _add_lines(self._revoked, [f"{one.serial:x} {name} {self._at:%Y-%m-%dT%H:%M:%SZ}" for one in found])
        return len(found)

    def issued(self) -> list[Issued]:
        """All certificates that the authority has made, in that order."""
        lines = self._lines()
        revoked = Revoked(self._revoked if self._revoked.exists() or _of_robots(lines) else None)
        try:
            return [_issued(line, revoked) for line in lines]
        except ValueError as error:
            raise self._unknown(error) from error

    def _lines(self) -> list[str]:
        try:
            return read_bytes(self._log).decode("ascii").splitlines() if self._log.exists() else []
        except (OSError, ValueError) as error:
            raise self._unknown(error) from error

    def _unknown(self, error: Exception) -> UserError:
        return UserError(
            f"the list of certificates {self._log} cannot be read ({error}), so it is not known whose there are; "
            "restore it, or remove the line that is not whole."
        )

    def _check_revoked(self, unknown: bool) -> None:
        if unknown:
            raise UserError(
                f"{self._revoked} is missing, so it is not known which robots were revoked and nothing is made; copy "
                "it back from the server's machine or, if no robot has a certificate yet, run: vla-rl certs server "
                f"{self.folder}."
            )

    def _check_successor(self, name: str) -> None:
        for issued in self.issued():
            same = (issued.role, issued.name, issued.revoked) == ("robot", name, False)
            if same and issued.expires > self._at + _RENEWAL:
                raise UserError(
                    f"robot {name!r} has a certificate until {issued.expires:%Y-%m-%d}, and two of one name would be "
                    "taken for one robot, so none is made; choose another name, or revoke it first: vla-rl certs "
                    f"revoke {self.folder} {name}."
                )

    def _issue(self, role: Role, name: str, days: int, hosts: Sequence[str]) -> dict[str, bytes]:
        key = generate_private_key(SECP256R1())
        alternatives = [x509.UniformResourceIdentifier(_URI.format(role, name)), *map(_host, hosts)]
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if role == "robot" else ExtendedKeyUsageOID.SERVER_AUTH
        certificate = (
            _builder(_named(name), self._certificate.subject, key, self._at, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .sign(self._key, SHA256())
        )
        expires = certificate.not_valid_after_utc.isoformat()
        # Before the certificate is on disk: one that nobody can list could not be revoked.
        _add_lines(self._log, [f"{certificate.serial_number:x} {role} {name} {expires}"])
        authority = self._certificate.public_bytes(Encoding.PEM)
        return {
            "ca.pem": authority,
            f"{role}.pem": certificate.public_bytes(Encoding.PEM),
            f"{role}.key": _private(key),
        }


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, start: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    """An authority signs certificates, all others sign handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Every one of ``files`` in ``folder``, whole or as it was; a new folder has all of them from the beginning."""
    part = folder if folder.exists() else folder.with_name(f".{folder.name}.part")
    if part != folder:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, mode=0o700)
    for name, data in files.items():
        write_whole(part / name, data, 0o600 if name.endswith(".key") else 0o644)
    part.rename(folder)
    sync(folder.parent)


def _add_lines(path: Path, lines: Sequence[str]) -> None:
    before = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    write_whole(path, "".join(f"{line}\n" for line in (*before, *lines)).encode("ascii"), 0o644)


def _of_robots(lines: Sequence[str]) -> bool:
    """Whether one of the certificates in ``lines`` is a robot's."""
    return any(" robot " in line for line in lines)


def _issued(line: str, revoked: Revoked) -> Issued:
    """Raises ValueError for a line that is none."""
    serial, role, name, expires = line.split()
    if role not in ("robot", "server"):
        raise ValueError(f"{role!r} is no role")
    if not NAME.fullmatch(name) or len(serial) > _SERIAL or datetime.fromisoformat(expires).tzinfo is None:
        raise ValueError(f"{name!r} until {expires!r} is no certificate")
    return Issued(role, name, int(serial, 16), datetime.fromisoformat(expires), int(serial, 16) in revoked)  # type: ignore[arg-type]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other thread or process changes ``folder`` meanwhile; raises UserError for a disk that takes nothing."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
    except (OSError, UnicodeError) as error:  # also of a list that is no text
        raise UserError(
            f"{folder} cannot be changed ({error}), so what it held counts as before; make room, or look at its disk."
        ) from error
