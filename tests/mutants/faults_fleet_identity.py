"""Faults in who is let into a fleet."""

from __future__ import annotations

from tests.mutants.fault import Fault

_IDENTITY, _AUTHORITY = (f"vla_rl/fleet/{name}.py" for name in ("identity", "authority"))
_ON = "tests/fleet/test_identity.py::"
_DATES = f"{_ON}test_an_expired_certificate_and_one_of_the_future_are_refused"
_BROKEN = f"{_ON}test_credentials_that_would_not_work_are_refused_when_they_are_read"
_REVOKED = f"{_ON}test_a_revoked_robot_is_refused_at_once_and_its_successor_is_not"
_KEYS = f"{_ON}test_private_keys_are_their_owners_alone"

FAULTS = (
    Fault(
        "expired certificates are taken",
        _IDENTITY,
        "if not certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc:",
        "if not certificate.not_valid_before_utc <= at:",
        (_DATES,),
    ),
    Fault(
        "a server's certificate is a robot's",
        _IDENTITY,
        "if len(owner) != 1 or not NAME.fullmatch(owner[0]):",
        "if len(owner) > 1:\n        pass\n    elif not owner:\n        return 'server'\n    if False:",
        (f"{_ON}test_a_certificate_names_its_robot_and_nobody_else_is_one", _BROKEN),
    ),
    Fault(
        "revoked certificates are taken",
        _IDENTITY,
        "if read.serial_number in revoked:",
        "if False:",
        (_REVOKED,),
    ),
    Fault(
        "the list of revoked certificates is read once",
        _IDENTITY,
        "            if state != self._read:",
        "            if self._read is None:",
        (_REVOKED,),
    ),
    Fault(
        "a broken list of revoked certificates lets everybody in",
        _IDENTITY,
        "for line in lines if line.strip())",
        "for line in lines if line.split()[0].isdigit())",
        (f"{_ON}test_a_list_that_cannot_be_read_lets_nobody_in",),
    ),
    Fault(
        "another authority's certificates are taken",
        _IDENTITY,
        "        certificate.verify_directly_issued_by(authority)",
        "        pass",
        (_BROKEN,),
    ),
    Fault(
        "a key need not belong to the certificate",
        _IDENTITY,
        "if key.public_key().public_bytes(*spki) != certificate.public_key().public_bytes(*spki):",
        "if False:",
        (_BROKEN,),
    ),
    Fault(
        "a private key that everybody can read is used",
        _IDENTITY,
        "st_mode & 0o077",
        "st_mode & 0o007",
        (_KEYS,),
    ),
    Fault(
        "private keys are written for everybody",
        _AUTHORITY,
        'mode = 0o600 if name.endswith(".key") else 0o644',
        "mode = 0o644",
        (_KEYS,),
    ),
    Fault(
        "an address that begins like this machine's is this machine",
        "vla_rl/contract/loopback.py",
        'return host == "localhost"',
        'return host.startswith(("localhost", "127."))',
        (
            "tests/contract/test_loopback.py::test_others",
            f"{_ON}test_every_other_address_refuses_to_start_without_them",
        ),
    ),
    Fault(
        "two robots get one name",
        _AUTHORITY,
        "if same and issued.expires > self._at + _RENEWAL:",
        "if False:",
        (_REVOKED, f"{_ON}test_a_certificate_that_ends_soon_may_have_a_successor"),
    ),
    Fault(
        "a renewed server forgets who was revoked",
        _AUTHORITY,
        'self._revoked.read_bytes() if self._revoked.exists() else b""',
        'b""',
        ("tests/cli/test_certs.py::test_the_server_gets_another_certificate_of_the_same_authority",),
    ),
)
