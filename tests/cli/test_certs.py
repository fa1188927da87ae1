"""``vla-rl certs``: the folders that it makes, its dates and its refusals."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from vla_rl.cli import main
from vla_rl.fleet.identity import load_credentials, now


@pytest.fixture
def folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["certs", "init", str(tmp_path / "certs"), "--host", "10.0.0.5", "fleet.lan"])
    return tmp_path / "certs"


def test_a_server_and_a_robot_get_folders_and_dates(folder, capsys):
    main(["certs", "robot", str(folder), "arm-1", "--days", "7"])
    robot = load_credentials(folder / "robots/arm-1", "robot")
    assert robot.name == "arm-1" and timedelta(days=6) < robot.expires - now() <= timedelta(days=7)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert f"valid until {robot.expires:%Y-%m-%d}" in said and str(folder / "robots/arm-1") in said
    assert load_credentials(folder / "server", "server").name == "server"


def test_the_list_says_which_are_valid_expired_and_revoked(folder, capsys):
    for name in ("arm-1", "arm-2"):
        main(["certs", "robot", str(folder), name])
    main(["certs", "revoke", str(folder), "arm-2"])
    issued = folder / "authority/issued.txt"
    issued.write_text(issued.read_text() + "ab robot old 2020-01-01T00:00:00+00:00\n")
    main(["certs", "list", str(folder)])
    table = capsys.readouterr().out
    assert re.search(rf"server .* {now().year + 1}-\S+ .*valid", table) and re.search(r"arm-1 .*valid", table)
    assert re.search(r"arm-2 .*revoked", table) and re.search(r"old .*2020-01-01.*expired", table)


def test_the_server_gets_another_certificate_of_the_same_authority(folder):
    main(["certs", "robot", str(folder), "arm-1"])
    main(["certs", "revoke", str(folder), "arm-1"])
    before = load_credentials(folder / "server", "server")
    kept = [(folder / "server" / name).read_bytes() for name in ("signing.key", "revoked.txt")]
    main(["certs", "server", str(folder), "--days", "30"])
    after = load_credentials(folder / "server", "server")
    assert after.authority == before.authority and after.certificate != before.certificate
    assert [(folder / "server" / name).read_bytes() for name in ("signing.key", "revoked.txt")] == kept


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "certs needs a command"),
        (["innit"], "did you mean 'init'?"),
        (["init"], "needs FOLDER"),
        (["robot", "CERTS"], "needs FOLDER and NAME"),
        (["init", "CERTS"], "has an authority already"),
        (["robot", "CERTS", "../arm"], "cannot be a robot's name"),
        (["robot", "CERTS", "arm", "--days", "0"], "RobotCertificate.days is 0"),
        (["revoke", "CERTS", "nobody"], "has no certificate that could be revoked"),
        (["robot", "nowhere", "arm"], "nowhere holds no authority"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(complaint, folder, arguments, sentence):
    given = [str(folder) if one == "CERTS" else one for one in arguments]
    assert sentence in re.sub(r"\s+", " ", complaint("certs", *given))
