"""The fleet's page: live, read-only, and for those who may see it."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from vla_rl import pages
from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.intervals import wilson
from vla_rl.fleet.identity import Authority
from vla_rl.fleet.page import ALARMS, ALARMS_OF_ONE, OTHERS, RECENT, VERSIONS_OF_ONE, Status, metrics, serve_page
from vla_rl.fleet.payloads import EpisodeEnd
from vla_rl.pages import PageAddress, PageServer

TOKEN = "a-token-of-this-test"


@contextmanager
def served(**options: object) -> Iterator[PageServer]:
    with closing(serve_page(filled()[0], PageAddress(**options))) as server:  # type: ignore[arg-type]
        yield server


@contextmanager
def connected(server: PageServer) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)) as connection:
        yield connection


def get(server: PageServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with connected(server) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()


def test_the_page_loads_nothing_from_elsewhere():
    with served() as server:
        answer, body = get(server, "/")
        policy = answer.getheader("Content-Security-Policy") or ""
        assert get(server, "/")[0].getheader("Content-Security-Policy") != policy, "each has a nonce of its own"
    assert answer.status == 200 and "default-src 'none'" in policy
    text = body.decode()
    assert "https://" not in text and 'src="' not in text and "NONCE" not in text
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert text.count(f'nonce="{nonce}"') == 2, "one script and one style"
    assert "innerHTML" not in text, "a robot's words are text, never markup"


def test_the_status_is_the_snapshot():
    with served() as server:
        answer, body = get(server, "/status")
        assert answer.getheader("Content-Type") == "application/json"
        assert json.loads(body)["robots"].keys() == {"left", "right"}
        assert b"vla_rl_fleet_robot_episodes_total" in get(server, "/metrics")[1]
        assert get(server, "/nothing")[0].status == 404


def test_events_are_live():
    status = filled()[0]
    with closing(serve_page(status, PageAddress())) as server, connected(server) as one:
        one.request("GET", "/events")
        answer = one.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        assert _event(answer)["total"]["episodes"] == 4
        status.alarm("the left arm is stopped")
        while not (seen := _event(answer))["alarms"]:
            pass
        assert seen["alarms"][0]["sentence"] == "the left arm is stopped"


def _event(answer: http.client.HTTPResponse) -> dict:
    line = answer.readline()
    assert line.startswith(b"data: ") and answer.readline() == b"\n"
    return json.loads(line[6:])


def test_another_sites_name_is_refused():
    with served() as server:
        assert get(server, "/status", Host="evil.example")[0].status == 403
        assert get(server, "/status", Host="localhost:80")[0].status == 200


def test_a_token_is_asked_for_everywhere():
    with served(token=TOKEN) as server:
        for path in ("/", "/status", "/metrics", "/events", "/nothing"):
            answer, body = get(server, path)
            assert answer.status == 401 and b"left" not in body
        assert get(server, "/status?token=wrong")[0].status == 401
        assert get(server, "/status", Authorization=f"Basic {TOKEN}")[0].status == 401
        assert get(server, f"/status?token={TOKEN}")[0].status == 200
        assert get(server, "/metrics", Authorization=f"Bearer {TOKEN}")[0].status == 200
        assert server.url.endswith(f"?token={TOKEN}") and TOKEN not in repr(server.address)


def test_it_is_read_only():
    with served() as server, connected(server) as one:
        one.request("POST", "/status", body=b"{}")
        assert one.getresponse().status == 404


@pytest.mark.parametrize(
    "options",
    [{}, {"token": TOKEN}, {"tls": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)}],
    ids=["alone", "with a token", "with TLS"],
)
def test_another_address_needs_tls_and_a_token(options: dict[str, object]):
    with pytest.raises(UserError, match="no token or no TLS"):
        PageAddress("0.0.0.0", **options)  # type: ignore[arg-type]
    assert PageAddress("0.0.0.0", token=TOKEN, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)).admits(TOKEN)


def test_a_silent_client_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "CONNECTIONS", 3)
    with served() as server:
        silent = [socket.create_connection(server.server_address[:2], PATIENCE) for _ in range(2)]
        for _ in range(4):  # one place is left, and is free again after every answer
            while (status := _status(server)) is None:
                pass
            assert status == 200
        for sock in silent:
            sock.close()


def test_more_than_there_are_places_for_are_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "CONNECTIONS", 1)
    with served() as server, socket.create_connection(server.server_address[:2], PATIENCE):
        while _status(server) is not None:  # until the silent one has its place
            pass


def _status(server: PageServer) -> int | None:
    """The status of an answer; None where the connection was ended without one."""
    try:
        return get(server, "/status")[0].status
    except (ConnectionError, http.client.HTTPException):
        return None


def test_closing_ends_open_streams():
    with served() as server, connected(server) as one:
        one.request("GET", "/events")
        answer = one.getresponse()
        _event(answer)
        server.close()
        while answer.readline():
            pass


def test_tls_with_a_token_and_a_client_that_never_shakes_hands(tmp_path: Path):
    Authority.create(tmp_path / "certs", days=1)
    own = tmp_path / "certs/server"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / "server.pem", own / "server.key")
    trusting = ssl.create_default_context(cafile=str(own / "ca.pem"))
    with served(token=TOKEN, tls=context) as server, socket.create_connection(server.server_address[:2], PATIENCE):
        assert server.url.startswith("https://")
        with closing(http.client.HTTPSConnection("127.0.0.1", server.server_port, context=trusting)) as one:
            one.request("GET", "/status", headers={"Authorization": f"Bearer {TOKEN}"})
            assert json.loads(one.getresponse().read())["robots"].keys() == {"left", "right"}


SUCCESS = EpisodeEnd("success", steps=100, intervened=10, clipped=3, seconds=4.0)
FAILURE = EpisodeEnd("time_limit", steps=200, intervened=0, clipped=1, seconds=8.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled() -> tuple[Status, Clock]:
    clock = Clock()
    status = Status(clock, lambda: 5.0)
    status.connected("left", waiting=7)
    status.connected("right", waiting=0)
    for version, end in ((1, SUCCESS), (1, FAILURE), (2, SUCCESS)):
        status.episode("left", version, end)
    status.episode("right", 2, FAILURE)
    status.policy(1, "retired")
    status.policy(2, "active")
    status.policy(3, "staged")
    return status, clock


def test_episodes_are_counted_of_robots_versions_and_all():
    seen = filled()[0].snapshot()
    left, second = seen["robots"]["left"], seen["versions"]["2"]
    assert (left["episodes"], left["successes"], left["steps"], left["intervened"], left["clipped"]) == (
        3,
        2,
        400,
        20,
        7,
    )
    assert (left["low"], left["high"]) == wilson(2, 3) and left["success"] == 2 / 3 and left["seconds"] == 16.0
    assert (second["episodes"], second["successes"], second["state"]) == (2, 1, "active")
    assert (seen["total"]["episodes"], seen["total"]["successes"], seen["total"]["steps"]) == (4, 2, 600)
    assert seen["versions"]["3"] | {"low": 0, "high": 0} == seen["versions"]["3"] | {
        "low": 0,
        "high": 0,
        "success": None,
    }
    assert seen["recent"] == [[1, True], [1, False], [2, True], [2, False]]
    json.dumps(seen, allow_nan=False)


def test_a_robot_says_what_it_holds_and_when_it_was_heard():
    status, clock = filled()
    clock.now += 3
    status.stored("left", "lift", 2, size=500, waiting=6)
    status.stored("left", "", 2, size=500, waiting=5)
    status.dropped("left", 40)
    clock.now += 2
    status.disconnected("left")
    left, right = (status.snapshot()["robots"][name] for name in ("left", "right"))
    assert left["silent"] == 2.0 and right["silent"] == 5.0
    assert (left["records"], left["bytes"], left["waiting"], left["dropped"]) == (2, 1000, 5, 40)
    assert left["task"] == "lift" and not left["connected"] and right["connected"]


def test_a_robot_of_an_earlier_life_of_the_server_was_not_heard():
    status = Status()
    status.episode("old", 1, SUCCESS)
    assert status.snapshot()["robots"]["old"]["silent"] is None


def test_memory_is_bounded():
    status = Status()
    for n in range(ALARMS + 5):
        status.alarm(str(n))
    for _ in range(RECENT + 5):
        status.episode("r", 1, SUCCESS)
    seen = status.snapshot()
    assert seen["alarmed"] == ALARMS + 5 and len(seen["alarms"]) == ALARMS
    assert seen["alarms"][0]["sentence"] == str(ALARMS + 4), "the newest first"
    assert len(seen["recent"]) == RECENT and seen["total"]["episodes"] == RECENT + 5


def test_prometheus_reads_the_same_numbers():
    status = filled()[0]
    status.stored("left", "lift", 2, size=500, waiting=6)
    status.alarm("look")
    lines = dict(line.rsplit(" ", 1) for line in metrics(status).decode().splitlines() if not line.startswith("#"))
    assert lines['vla_rl_fleet_robot_episodes_total{robot="left"}'] == "3.0"
    assert lines['vla_rl_fleet_robot_intervened_total{robot="left"}'] == "20.0"
    assert lines['vla_rl_fleet_waiting{robot="left"}'] == "6.0"
    assert lines['vla_rl_fleet_version{robot="left"}'] == "2.0"
    assert lines['vla_rl_fleet_connected{robot="right"}'] == "1.0"
    assert lines['vla_rl_fleet_version_successes_total{version="2"}'] == "1.0"
    assert lines['vla_rl_fleet_version_state{state="active",version="2"}'] == "1.0"
    assert lines['vla_rl_fleet_version_state{state="active",version="1"}'] == "0.0"
    assert lines["vla_rl_fleet_alarms_total"] == "1.0"


def test_the_end_of_an_episode_comes_back():
    assert EpisodeEnd.from_payload(SUCCESS.payload()) == SUCCESS and SUCCESS.success and not FAILURE.success


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": -1},
        {"intervened": 101},
        {"clipped": -1},
        {"steps": True},
        {"seconds": float("nan")},
        {"seconds": 1e300},
        {"steps": 1 << 40},
        {"seconds": 4},
        {"outcome": ""},
        {"outcome": "x" * 65},
        {"outcome": "a\nb"},
        {"outcome": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_wrong_end_is_refused(changed: dict[str, object]):
    with pytest.raises(ContractError, match="end of an episode says"):
        EpisodeEnd.from_payload(wire.pack(vars(SUCCESS) | changed))


def sentences(status: Status) -> list[str]:
    return [one["sentence"] for one in status.snapshot()["alarms"]]


def test_what_is_wrong_now_stands_first_since_when_it_began_and_goes_when_it_is_over():
    walls = iter([10.0, 20.0, 30.0])
    status = Status(Clock(), lambda: next(walls))
    status.standing("disk", "it is nearly full")
    status.alarm("something happened")
    status.standing("disk", "it is full")
    assert sentences(status) == ["it is full", "something happened"]
    seen = status.snapshot()
    assert seen["alarms"][0]["at"] == 10.0 and seen["alarmed"] == 2
    status.standing("disk", "")
    assert sentences(status) == ["something happened"]


def test_a_robot_that_is_not_heard_and_a_page_that_stands_still_are_alarms_while_they_are():
    status, clock = filled()
    status.looked()
    status.disconnected("left")
    status.stored("old", "lift", 1, 10, 0)  # of an earlier life of the server
    clock.now += 61
    status.connected("right", 0)
    found = sentences(status)
    assert len(found) == 2 and "not counted since then" in found[0] and "'left'" in found[1]
    assert status.snapshot()["alarms"][1]["at"] == 5.0 - 61
    status.looked()
    status.connected("left", 0)
    assert sentences(status) == []


def test_one_robot_has_its_share_of_alarms_and_of_versions():
    status = Status()
    for _ in range(3):
        status.alarm("of another", "other")
    for n in range(1000):
        status.alarm(f"again {n}", "loud")
        status.episode("loud", 10**6 + n, SUCCESS)
    status.policy(7, "active")
    status.episode("loud", 7, SUCCESS)
    status.episode("other", 3, SUCCESS)
    assert len(sentences(status)) == ALARMS_OF_ONE + 1 and "of another" in sentences(status)
    versions = status.snapshot()["versions"]
    assert len(versions) == VERSIONS_OF_ONE + 3 and versions["7"]["episodes"] == versions["3"]["episodes"] == 1
    assert versions[str(OTHERS)]["episodes"] == 1000 - VERSIONS_OF_ONE
    assert len(metrics(status)) < 10_000
