"""``vla-rl certs`` and ``vla-rl fleet``: who may join, and which policy a fleet's robots run, beside its server."""

from __future__ import annotations

import re
from datetime import timedelta

import numpy as np
import pytest

from tests.fleet.checkpoints import KEY, PUBLISHED, checkpoint
from vla_rl.cli import main
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.identity import load_credentials, now
from vla_rl.fleet.manifest import TrustedKeys
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import Outcomes
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.fleet import serving
from vla_rl.recipes.fleet.publishing import answer, publish_first
from vla_rl.recipes.fleet.serving import signing_key


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


def test_the_server_gets_another_certificate_of_its_authority(folder):
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
        ("certs innit", "did you mean 'init'?"),
        ("certs robot CERTS", "needs FOLDER and NAME"),
        ("certs init CERTS", "has an authority already"),
        ("certs robot CERTS arm --days 0", "RobotCertificate.days is 0"),
        ("certs revoke CERTS nobody", "has no certificate that could be revoked"),
        ("fleet promot", "did you mean 'promote'"),
        ("fleet promote FLEET second", "'second' is no version of a policy"),
        ("fleet promote FLEET 3", "there is no policy version 3"),
        ("fleet publish FLEET nowhere --credentials nobody", "holds no signing key"),
        ("fleet rollback FLEET", "nothing to go back to"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(complaint, folder, fleet, arguments, sentence):
    given = arguments.replace("CERTS", str(folder)).replace("FLEET", str(fleet)).split()
    assert sentence in re.sub(r"\s+", " ", complaint(*given))


@pytest.fixture
def fleet(tmp_path):
    """A fleet's folder with two staged versions, of which ``arm`` has played the first."""
    registry = Registry(tmp_path / "fleet" / "registry")
    for version in (1, 2):
        registry.publish(checkpoint(tmp_path / str(version), version), PUBLISHED, KEY, "a test", "")
    registry.record(1, "arm", 1, Outcomes(4, 3))
    return tmp_path / "fleet"


def test_versions_are_tried_promoted_pinned_and_taken_back(fleet, capsys):
    beside = Registry(fleet / "registry")
    for command in ("promote {} 1 --why first", "try {} 2", "pin {} 1 --robot other"):
        main(["fleet", *command.format(fleet).split()])
    releases = beside.releases
    assert (releases.active, releases.canary, releases.canary_robots) == (1, 2, {"arm"})
    assert releases.pins == {"other": 1}
    capsys.readouterr()
    main(["fleet", "versions", str(fleet)])
    said = re.sub(r"\s+", " ", "".join(capsys.readouterr()))
    assert re.search(r"1 . active . 4 . 75% \[", said) and "other is pinned to version 1" in said
    main(["fleet", "rollback", str(fleet), "--why", "it is slow"])
    main(["fleet", "unpin", str(fleet), "--robot", "other"])
    assert beside.releases.canary is None and not beside.releases.pins
    made = [(one["do"], one["why"]) for one in beside.history()[2:]]
    assert made == [("promote", "first"), ("canary", ""), ("pin", ""), ("roll back", "it is slow"), ("unpin", "")]


def test_a_published_checkpoint_answers_on_a_robot_as_here(tmp_path, untrained):
    folder = tmp_path / "fleet"
    registry = Registry(folder / "registry")
    key = signing_key(folder, "")
    assert "version 1 is active" in publish_first(registry, key, str(untrained()))
    assert "version 1 stays active" in publish_first(registry, key, str(untrained()))
    main(["fleet", "publish", str(folder), str(untrained()), "--why", "again"])
    assert registry.releases.stages == {1: "active", 2: "staged"}

    keys = TrustedKeys([(folder / "signing.pub").read_bytes()])
    cached = PolicyCache(tmp_path / "robot", keys).fetch(2, registry.get(2).spec_hash, registry)
    policy, golden = load_policy(cached.folder), cached.manifest.golden
    found = answer(policy, cached.observation, golden.seed)
    np.testing.assert_allclose(found, golden.action, atol=1e-6)
    assert np.abs(answer(policy, cached.observation, golden.seed + 1) - golden.action).max() > 1e-3, "the noise counts"
    with pytest.raises(ContractError, match="golden observation"):
        answer(policy, b"\x80", 1)


def test_a_server_begins_with_a_policy_and_keeps_it(tmp_path, untrained, complaint, monkeypatch):
    begin = serving._begin

    def begin_and_stop(*given):
        begin(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "_begin", begin_and_stop)
    for _ in range(2):
        given = ("serve", tmp_path / "fleet", "--policy", untrained(), "--port", 0, "--page-port", 0)
        assert "stopped serving" in complaint(*given, status=130)
    assert Registry(tmp_path / "fleet" / "registry").releases.stages == {1: "active"}
