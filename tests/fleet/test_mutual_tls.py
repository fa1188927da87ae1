"""Who is let in over TLS, on real sockets: robots of this fleet, by the name in their certificate, and nobody else."""

from __future__ import annotations

from datetime import timedelta

import grpc
import pytest

from tests.fleet.fleets import Hand, hello, spool_of
from tests.patience import wait_until
from vla_rl.contract.errors import UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.identity import Authority, Credentials, Revoked, load_credentials, now
from vla_rl.fleet.link import Link, LinkOptions
from vla_rl.fleet.protocol import MANIFEST, call_path, write_records

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Certificates of this fleet in ``ours``, of another one in ``theirs``."""
    folder = tmp_path_factory.mktemp("certs")
    for name in ("ours", "theirs"):
        authority = Authority.create(folder / name)
        authority.robot("arm-1")
        authority.robot("arm-2")
    Authority(folder / "ours", now() - timedelta(days=10)).robot("late", days=5)
    return folder


def robot(made, name="arm-1", fleet="ours"):
    return load_credentials(made / fleet / "robots" / name, "robot")


def server_of(made, fleet="ours"):
    return load_credentials(made / fleet / "server", "server")


@pytest.fixture
def server(serve, made):
    return serve(server_of(made), Revoked(made / "ours/server/revoked.txt"))


def test_records_and_policies_pass_under_the_name_of_the_certificate(server, link, store, policies, made):
    policies.publish(b"abc")
    spools = [spool_of(30, robot=name) for name in ("arm-1", "arm-2")]
    robots = [link(server.port, spool, robot(made, spool.robot)) for spool in spools]
    for one in robots:
        wait_until(lambda one=one: one.status().durable == 29)
        assert one.manifest(1)
    assert {record.robot for record in store.records} == {"arm-1", "arm-2"} and len(store.records) == 60


def test_a_robot_cannot_pass_for_another(server, made, store):
    with Hand(server.port, robot(made, "arm-2")) as hand:
        hand.send(hello(spool_of(3)))
        code, sentence = hand.ending()
    assert code is Code.PERMISSION_DENIED and "calls itself 'arm-1' and its certificate names 'arm-2'" in sentence
    own = spool_of(3, robot="arm-2")
    with Hand(server.port, robot(made, "arm-2")) as hand:
        hand.greet(own)
        hand.send(write_records(spool_of(1).records))  # of arm-1, whose hashes cannot be arm-2's
        assert hand.ending()[0] is Code.INVALID_ARGUMENT
    assert not store.records


def _expired(made):
    folder = made / "ours/robots/late"
    parts = [(folder / name).read_bytes() for name in ("ca.pem", "robot.pem", "robot.key")]
    return Credentials("late", "robot", *parts, now())


def _of_the_server(made):
    ours = server_of(made)
    return Credentials("arm-1", "robot", ours.authority, ours.certificate, ours.private_key, ours.expires)


def _foreign(made):
    """Another authority's, and it believes ours."""
    other = robot(made, fleet="theirs")
    return Credentials("arm-1", "robot", server_of(made).authority, other.certificate, other.private_key, other.expires)


REFUSED = {
    "another authority's": _foreign,
    "expired": _expired,
    "a server's": _of_the_server,
    "none": lambda made: None,
}


@pytest.mark.parametrize("case", REFUSED)
def test_who_has_no_certificate_of_a_robot_of_this_fleet_gets_nothing(server, made, store, case):
    with Hand(server.port, REFUSED[case](made)) as hand:
        hand.send(hello(spool_of(3)))
        code, _ = hand.ending()
    assert code in (Code.UNAVAILABLE, Code.PERMISSION_DENIED) and not server.waiting() and not store.records
    with Hand(server.port, robot(made)) as hand:  # and the server goes on
        assert hand.greet(spool_of(3)).durable_seq == -1


@pytest.mark.parametrize("case", ["a robot", "another fleet's server", "no TLS"])
def test_a_robot_sends_nothing_to_what_is_no_server_of_its_fleet(serve, link, made, store, case):
    pretender = {
        "a robot": robot(made, "arm-2"),
        "another fleet's server": server_of(made, "theirs"),
        "no TLS": None,
    }[case]
    server = serve(pretender)
    state = link(server.port, spool_of(3), robot(made)).status
    wait_until(lambda: state().attempts > 1)
    assert state().trouble and not state().sent and not server.waiting() and not store.records


def test_a_revoked_robot_is_put_out_and_downloads_nothing(serve, link, tmp_path, caplog):
    authority = Authority.create(tmp_path / "certs")
    authority.robot("arm-1")
    mine = load_credentials(tmp_path / "certs/robots/arm-1", "robot")
    server_credentials = load_credentials(tmp_path / "certs/server", "server")
    server = serve(server_credentials, Revoked(tmp_path / "certs/server/revoked.txt"), heartbeat_s=0.05)
    one = link(server.port, spool_of(3), mine)
    wait_until(lambda: one.status().durable == 2)
    authority.revoke("arm-1")
    wait_until(lambda: "has been revoked" in one.status().trouble and one.status().attempts > 2)
    assert not server.waiting() and "'arm-1' has been revoked" in caplog.text
    with Hand(server.port, mine) as hand, pytest.raises(grpc.RpcError) as caught:
        hand.channel.unary_unary(call_path(MANIFEST))(pb.ManifestRequest(version=1).SerializeToString(), timeout=60)
    assert caught.value.code() is Code.PERMISSION_DENIED


def test_a_robot_does_not_start_with_the_certificate_of_another(made):
    with pytest.raises(UserError, match="'arm-2'"):
        Link(spool_of(3), LinkOptions(), robot(made, "arm-2"))
