"""Certificates: who they name, and what is refused before anything is sent."""

from __future__ import annotations

import shutil
from datetime import timedelta

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.fleet.authority import Authority
from vla_rl.fleet.identity import RefusedError, Revoked, check_reach, load_credentials, now, robot_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs") / "certs"
    authority = Authority.create(folder, ["10.0.0.5", "fleet.lan"])
    authority.robot("arm-1")
    authority.robot("short", days=1)
    return folder


def test_a_certificate_names_its_robot_and_nobody_else_is_one(made):
    assert robot_of((made / "robots/arm-1/robot.pem").read_bytes(), Revoked(None)) == "arm-1"
    with pytest.raises(RefusedError, match="of no robot"):
        robot_of((made / "server/server.pem").read_bytes(), Revoked(None))
    with pytest.raises(RefusedError, match="cannot be read"):
        robot_of(b"no certificate", Revoked(None))


def test_an_expired_certificate_and_one_of_the_future_are_refused(made):
    pem = (made / "robots/short/robot.pem").read_bytes()
    assert robot_of(pem, Revoked(None), lambda: now() + timedelta(hours=23)) == "short"
    for days in (-1, 2):
        with pytest.raises(RefusedError, match=r"valid from .* set the clock"):
            robot_of(pem, Revoked(None), lambda days=days: now() + timedelta(days=days))
        with pytest.raises(RefusedError, match=r"valid from .* set the clock"):
            load_credentials(made / "robots/short", "robot", lambda days=days: now() + timedelta(days=days))


def test_a_revoked_robot_is_refused_at_once_and_its_successor_is_not(tmp_path):
    authority = Authority.create(tmp_path / "certs")
    old = (authority.robot("arm-1") / "robot.pem").read_bytes()
    revoked = Revoked(tmp_path / "certs/server/revoked.txt")
    assert robot_of(old, revoked) == "arm-1"
    with pytest.raises(UserError, match="two of one name"):
        authority.robot("arm-1")
    assert authority.revoke("arm-1") == 1
    with pytest.raises(RefusedError, match="'arm-1' has been revoked"):
        robot_of(old, revoked)
    assert robot_of((authority.robot("arm-1") / "robot.pem").read_bytes(), revoked) == "arm-1"


def test_a_certificate_that_ends_soon_may_have_a_successor(made):
    assert Authority(made).robot("short", days=40).exists()  # it had one day left
    with pytest.raises(UserError, match="two of one name"):
        Authority(made).robot("short")


def test_a_list_that_cannot_be_read_lets_nobody_in(made, tmp_path):
    broken = tmp_path / "revoked.txt"
    broken.write_text("zzz arm-1\n")
    with pytest.raises(UserError, match="no robot is let in"):
        robot_of((made / "robots/arm-1/robot.pem").read_bytes(), Revoked(broken))


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
