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

from tests.fleet.test_status import filled
from tests.patience import PATIENCE
from vla_rl import pages
from vla_rl.contract.errors import UserError
from vla_rl.fleet.identity import Authority
from vla_rl.fleet.page import Status, serve_page
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
    assert answer.status == 200 and "default-src 'none'" in policy
    text = body.decode()
    assert "https://" not in text and 'src="' not in text and "NONCE" not in text
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert text.count(f'nonce="{nonce}"') == 2, "one script and one style"
    assert "innerHTML" not in text, "a robot's words are text, never markup"


def test_every_answer_has_a_nonce_of_its_own():
    with served() as server:
        first, second = (get(server, "/")[0].getheader("Content-Security-Policy") for _ in range(2))
    assert first != second


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


def test_a_port_that_is_taken_is_named():
    with served() as server, pytest.raises(UserError, match=f"port {server.server_port} of 127.0.0.1"):
        serve_page(Status(), PageAddress(port=server.server_port))


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
