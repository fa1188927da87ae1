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
        "vla_rl/contract/keys.py",
        "if mode & 0o077:",
        "if mode & 0o007:",
        (_KEYS, "tests/contract/test_keys.py::test_a_secret_that_others_can_read_is_refused"),
    ),
    Fault(
        "private keys are written for everybody",
        _AUTHORITY,
        '0o600 if name.endswith(".key") else 0o644)',
        "0o644)",
        (_KEYS,),
    ),
    Fault(
        "private keys are their owner's alone once they are written",
        "vla_rl/contract/keys.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)",
        ("tests/contract/test_keys.py::test_what_guards_is_its_owners_from_the_beginning_and_never_there_in_part",),
    ),
    Fault(
        "an empty file is a key",
        "vla_rl/contract/keys.py",
        "if len(key) < _SHORTEST:",
        "if False:",
        ("tests/contract/test_keys.py::test_a_secret_that_is_empty_or_short_is_refused",),
    ),
    Fault(
        "an empty variable is no key, and everybody is let in",
        "vla_rl/serving/api_key.py",
        "if not path and VARIABLE not in os.environ:",
        "if not path and not os.environ.get(VARIABLE, '').strip():",
        ("tests/serving/test_access.py::test_an_empty_variable_is_no_missing_key",),
    ),
    Fault(
        "what guards is written in place",
        "vla_rl/contract/keys.py",
        "(put or os.replace)(aside, path)",
        "path.write_bytes(b''), path.write_bytes(data), path.chmod(mode)",
        (
            "tests/contract/test_keys.py::test_what_guards_is_its_owners_from_the_beginning_and_never_there_in_part",
            "tests/fleet/test_signing.py::test_of_two_that_make_a_key_at_once_one_wins_and_a_killed_one_leaves_none",
        ),
    ),
    Fault(
        "a server's folder is removed before there is another",
        _AUTHORITY,
        "part = folder if folder.exists() else folder",
        "part = shutil.rmtree(folder, ignore_errors=True) or folder",
        (f"{_ON}test_killed_before_any_change_of_the_disk_nobody_who_was_revoked_is_let_in",),
    ),
    Fault(
        "two commands at once lose each other's lines",
        _AUTHORITY,
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "pass",
        (f"{_ON}test_commands_at_once_do_not_lose_each_other_s_lines",),
    ),
    Fault(
        "half of a list lets in who was revoked",
        _IDENTITY,
        "self._serials |= frozenset",
        "self._serials = frozenset",
        (f"{_ON}test_who_was_revoked_once_is_refused_while_the_list_is_written_anew",),
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
        "a list of revoked certificates that is missing is begun anew",
        _AUTHORITY,
        "self._check_revoked(_of_robots(self._lines()))",
        "pass",
        (f"{_ON}test_a_missing_list_lets_nobody_in_and_is_not_begun_anew",),
    ),
    Fault(
        "a renewed server forgets who was revoked",
        _AUTHORITY,
        "if not self._revoked.exists():",
        "if kept:",
        (
            "tests/cli/test_certs.py::test_the_server_gets_another_certificate_of_the_same_authority",
            f"{_ON}test_killed_before_any_change_of_the_disk_nobody_who_was_revoked_is_let_in",
        ),
    ),
)
