"""Certificates: who they name, and what is refused before anything is sent."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from datetime import timedelta

import pytest

from tests.held import Killed
from vla_rl.contract.errors import UserError
from vla_rl.fleet.identity import Authority, CertificateError, Revoked, check_reach, load_credentials, now, robot_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs") / "certs"
    authority = Authority.create(folder, ["10.0.0.5", "fleet.lan"])
    authority.robot("arm-1")
    authority.robot("short", days=1)
    return folder


def test_a_certificate_names_its_robot_and_nobody_else_is_one(made):
    assert robot_of((made / "robots/arm-1/robot.pem").read_bytes(), Revoked(None)) == "arm-1"
    with pytest.raises(CertificateError, match="of no robot"):
        robot_of((made / "server/server.pem").read_bytes(), Revoked(None))
    with pytest.raises(CertificateError, match="cannot be read"):
        robot_of(b"no certificate", Revoked(None))


def test_an_expired_certificate_and_one_of_the_future_are_refused(made):
    pem = (made / "robots/short/robot.pem").read_bytes()
    assert robot_of(pem, Revoked(None), lambda: now() + timedelta(hours=23)) == "short"
    for days in (-1, 2):
        with pytest.raises(CertificateError, match=r"valid from .* set the clock"):
            robot_of(pem, Revoked(None), lambda days=days: now() + timedelta(days=days))
        with pytest.raises(CertificateError, match=r"valid from .* set the clock"):
            load_credentials(made / "robots/short", "robot", lambda days=days: now() + timedelta(days=days))


def test_a_revoked_robot_is_refused_at_once_and_its_successor_is_not(tmp_path):
    authority = Authority.create(tmp_path / "certs")
    old = (authority.robot("arm-1") / "robot.pem").read_bytes()
    revoked = Revoked(tmp_path / "certs/server/revoked.txt")
    assert robot_of(old, revoked) == "arm-1"
    with pytest.raises(UserError, match="two of one name"):
        authority.robot("arm-1")
    assert authority.revoke("arm-1") == 1
    with pytest.raises(CertificateError, match="'arm-1' has been revoked"):
        robot_of(old, revoked)
    assert robot_of((authority.robot("arm-1") / "robot.pem").read_bytes(), revoked) == "arm-1"


def test_a_certificate_that_ends_soon_may_have_a_successor(tmp_path):
    made = tmp_path / "certs"
    Authority.create(made).robot("short", days=1)
    assert Authority(made).robot("short", days=40).exists()  # it had one day left
    with pytest.raises(UserError, match="two of one name"):
        Authority(made).robot("short")


def test_a_list_that_cannot_be_read_lets_nobody_in(made, tmp_path):
    broken = tmp_path / "revoked.txt"
    broken.write_text("zzz arm-1\n")
    with pytest.raises(UserError, match="no robot is let in"):
        robot_of((made / "robots/arm-1/robot.pem").read_bytes(), Revoked(broken))


def test_a_missing_list_lets_nobody_in_and_is_not_begun_anew(tmp_path):
    authority = Authority.create(tmp_path / "certs")
    pem, path = (authority.robot("arm-1") / "robot.pem").read_bytes(), tmp_path / "certs/server/revoked.txt"
    path.unlink()
    with pytest.raises(UserError, match="no robot is let in"):
        robot_of(pem, Revoked(path))
    for command in (authority.server, lambda: authority.robot("arm-2")):
        with pytest.raises(UserError, match="is missing, so it is not known which robots were revoked"):
            command()
    with pytest.raises(UserError, match="list of revoked certificates"):
        authority.revoke("arm-1")
    assert not path.exists()


def test_who_was_revoked_once_is_refused_while_the_list_is_written_anew(tmp_path):
    authority = Authority.create(tmp_path / "certs")
    pem, path = (authority.robot("arm-1") / "robot.pem").read_bytes(), tmp_path / "certs/server/revoked.txt"
    authority.revoke("arm-1")
    revoked = Revoked(path)
    path.write_text("")  # a copy of it is on its way
    with pytest.raises(CertificateError, match="has been revoked"):
        robot_of(pem, revoked)


def _killed(monkeypatch, at, command):
    """Whether ``command`` was killed before its ``at``-th change of the disk."""
    count = iter(range(1000))

    def dying(real):
        def called(*given, **options):
            if next(count) == at:
                raise Killed
            return real(*given, **options)

        return called

    with monkeypatch.context() as disk:
        for name in ("fsync", "replace", "link", "rename", "mkdir", "rmdir"):
            disk.setattr(f"os.{name}", dying(getattr(os, name)))
        try:
            command()
        except Killed:
            return True
        return False


@pytest.mark.parametrize("command", ["create", "server", "robot", "revoke"])
def test_killed_before_any_change_of_the_disk_nobody_who_was_revoked_is_let_in(tmp_path, monkeypatch, command):
    monkeypatch.setattr("os.fsync", lambda _: None)
    made = Authority.create(tmp_path / "made")
    gone, stays = ((made.robot(name) / "robot.pem").read_bytes() for name in ("gone", "stays"))
    made.revoke("gone")
    for at in range(100):
        folder = tmp_path / f"{at}"
        if command == "create":
            if not _killed(monkeypatch, at, lambda folder=folder: Authority.create(folder)):
                return
            assert not (folder / "authority").exists() or Authority(folder).server()
            shutil.rmtree(folder, ignore_errors=True)
            continue
        shutil.copytree(made.folder, folder)
        do = {
            "server": lambda folder=folder: Authority(folder).server(["robots.example"]),
            "robot": lambda folder=folder: Authority(folder).robot("new"),
            "revoke": lambda folder=folder: Authority(folder).revoke("stays"),
        }[command]
        killed = _killed(monkeypatch, at, do)
        for _ in range(2):  # as it was left, and after the person tries again
            with pytest.raises(CertificateError, match="has been revoked"):
                robot_of(gone, Revoked(folder / "server/revoked.txt"))
            assert {key.stat().st_mode & 0o777 for key in folder.rglob("*.key")} == {0o600}
            with suppress(UserError):  # "new" has a certificate, or "stays" is revoked, already
                do()
        revoked = Revoked(folder / "server/revoked.txt")
        if command == "revoke":
            with pytest.raises(CertificateError):
                robot_of(stays, revoked)
        else:
            assert robot_of(stays, revoked) == "stays"
        load_credentials(folder / "server", "server")
        if not killed:
            return
    pytest.fail("it never ends")


def test_commands_at_once_do_not_lose_each_other_s_lines(tmp_path):
    authority, names = Authority.create(tmp_path / "certs"), [f"arm-{number}" for number in range(8)]
    for change in (authority.robot, authority.revoke):
        several = [threading.Thread(target=change, args=(name,)) for name in names]
        for one in several:
            one.start()
        for one in several:
            one.join()
    robots = [one for one in authority.issued() if one.role == "robot"]
    assert sorted(one.name for one in robots) == names and all(one.revoked for one in robots)


def test_private_keys_are_their_owners_alone(made, tmp_path):
    keys = [*made.rglob("*.key")]
    assert len(keys) == 6 and {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    copied = tmp_path / "robot"
    shutil.copytree(made / "robots/arm-1", copied)
    (copied / "robot.key").chmod(0o640)
    with pytest.raises(UserError, match=r"can be read by other users.*chmod 600"):
        load_credentials(copied, "robot")


def _swap_key(folder, made):
    shutil.copy(made / "robots/short/robot.key", folder / "robot.key")


def _foreign_authority(folder, made):
    Authority.create(folder / "other")
    shutil.copy(folder / "other/authority/ca.pem", folder / "ca.pem")


def _server_as_robot(folder, made):
    for end in ("pem", "key"):
        shutil.copy(made / f"server/server.{end}", folder / f"robot.{end}")


BROKEN = {
    "a missing key": (lambda folder, made: (folder / "robot.key").unlink(), "holds no credentials of a robot"),
    "no PEM": (lambda folder, made: (folder / "robot.pem").write_text("x"), "no usable credentials"),
    "another's key": (_swap_key, "does not belong to robot.pem"),
    "a foreign authority": (_foreign_authority, "no usable credentials"),
    "a server's": (_server_as_robot, "of no robot"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_credentials_that_would_not_work_are_refused_when_they_are_read(made, tmp_path, case):
    shutil.copytree(made / "robots/arm-1", tmp_path / "robot")
    spoil, sentence = BROKEN[case]
    spoil(tmp_path / "robot", made)
    with pytest.raises(UserError, match=sentence):
        load_credentials(tmp_path / "robot", "robot")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_this_machine_needs_no_certificates(host):
    check_reach(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "fleet.lan", "localhost.evil.org", ""])
def test_every_other_address_refuses_to_start_without_them(host, made):
    with pytest.raises(UserError, match="leads to other machines"):
        check_reach(host, None)
    check_reach(host, load_credentials(made / "server", "server"))
