"""Who reaches a policy server: this machine, or whoever has the API key, over TLS."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus, WebSocketException

from sims.toy import counting
from sims.toy.counting import CountingEnv
from tests.patience import PATIENCE, wait_until
from tests.serving.openpi_style import OpenpiStyle, asked
from tests.serving.served import PATIENT, echo_policy, serving, serving_openpi
from tests.serving.test_remote import follow
from tests.tls import CERTIFICATE, private_key, secret_file
from vla_rl.contract.errors import UserError
from vla_rl.experience.driver import Driver
from vla_rl.serving.access import Access, Address, ApiKey, find_api_key
from vla_rl.serving.remote import RemotePolicy
from vla_rl.serving.websocket import DisconnectedError, connect

FILES = (CERTIFICATE, private_key())
SECRET, OTHER = "0123456789abcdef-right", "0123456789abcdef-wrong"
KEY = ApiKey(SECRET)
REFUSED, TOO_MANY = HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS


@pytest.fixture(autouse=True)
def no_key_of_the_person_who_tests(monkeypatch):
    monkeypatch.delenv("VLA_RL_API_KEY", raising=False)


def guarded(**options):
    """A server over TLS that wants the key."""
    access = Access("127.0.0.1", *FILES, KEY, clock=lambda: 0.0)
    return serving_openpi(echo_policy(), access=access, **options)


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=FILES[0])


# -- which address may be listened on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "robot.example", "127.0.0.1.example"])
@pytest.mark.parametrize("given", [(), FILES, (*FILES, None), ("", "", KEY)])
def test_other_machines_are_served_with_tls_and_a_key_alone(host, given):
    with pytest.raises(UserError, match=r"is reached by other machines, .* give --tls-cert, --tls-key and an API key"):
        Access(host, *given)
    Access(host, *FILES, KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_neither(host):
    assert Access(host).refusal("127.0.0.1", "") is None


def test_ipv6_is_served_too():
    with serving_openpi(echo_policy(), access=Access("::1")) as server:
        assert server.url.startswith("ws://[::1]:")
        with OpenpiStyle(server.url) as client:
            assert client.infer(asked(seed=4))["actions"][0, 1] == 4


@pytest.mark.parametrize(
    "files", [("nowhere.pem", FILES[1]), (FILES[0], FILES[0]), ("", FILES[1]), (FILES[0], "no.key")]
)
def test_files_that_are_no_certificate_and_key_are_said(files):
    with pytest.raises(UserError, match=r"cannot be used with the private key .* give PEM files"):
        Access("127.0.0.1", *files, KEY)


# -- the key -----------------------------------------------------------------------------------------------------------


def test_a_key_is_read_from_a_file_or_the_environment_and_is_never_printed(tmp_path, monkeypatch):
    assert find_api_key("") is None
    monkeypatch.setenv("VLA_RL_API_KEY", OTHER)
    secret_file(tmp_path / "key", f"  {SECRET}\n".encode())
    assert find_api_key("") == ApiKey(OTHER) and find_api_key(str(tmp_path / "key")) == KEY
    assert SECRET not in repr(KEY) + str(KEY) + f"{KEY!r}"
    assert KEY.header() == f"Api-Key {SECRET}"
    assert KEY.matches(f"Api-Key {SECRET}")
    for empty in ("", " \n"):
        monkeypatch.setenv("VLA_RL_API_KEY", empty)
        with pytest.raises(UserError, match=r"VLA_RL_API_KEY holds no API key .* or unset it"):
            find_api_key("")
    for wrong in ("", SECRET, f"Bearer {SECRET}", f"Api-Key {OTHER}", f"Api-Key {SECRET} ", "Api-Key \udcff"):
        assert not KEY.matches(wrong)


@pytest.mark.parametrize("content", [b"", b"short", b"two words that are long enough", b"\xff" * 20, b"k" * 2000])
def test_a_file_without_a_usable_key_is_said_without_its_content(tmp_path, content):
    secret_file(tmp_path / "key", content)
    with pytest.raises(UserError, match=r"holds (no API key of 16 to 1024|\d+ bytes)") as refused:
        find_api_key(str(tmp_path / "key"))
    assert content == b"" or content.decode(errors="replace") not in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        find_api_key(str(tmp_path / "nowhere"))


def test_wrong_keys_are_limited_per_address_and_open_connections_stay_open():
    with guarded() as server, OpenpiStyle(server.url, SECRET, ssl=trusting()) as client:
        statuses = []
        for key in ("", *[OTHER] * 11):
            with pytest.raises(InvalidStatus) as refused:
                OpenpiStyle(server.url, key, ssl=trusting())
            statuses.append(refused.value.response.status_code)
        assert statuses == [REFUSED] * 10 + [TOO_MANY] * 2, "before anything is sent"
        assert client.infer(asked(seed=4))["actions"][0, 1] == 4


def test_the_limit_is_of_one_address_and_ends_after_a_minute():
    now = [0.0]
    access = Access("0.0.0.0", *FILES, KEY, clock=lambda: now[0])

    def status(address: str, key: str) -> int | None:
        refusal = access.refusal(address, f"Api-Key {key}")
        return refusal[0] if refusal else None

    for k in range(10):
        now[0] = k
        assert status("10.0.0.1", OTHER) == REFUSED
    assert status("10.0.0.1", SECRET) == status("::ffff:10.0.0.1", SECRET) == TOO_MANY
    assert status("10.0.0.2", SECRET) is None, "another address is let in"
    now[0] = 60.0
    assert status("10.0.0.1", SECRET) is None
    assert status("10.0.0.1", OTHER) == REFUSED and status("10.0.0.1", SECRET) == TOO_MANY
    for k in range(10):
        assert status(f"2001:db8::{k}", OTHER) == REFUSED
    assert status("2001:db8::ffff", SECRET) == TOO_MANY, "whoever has one IPv6 address has a whole /64"
    assert status("2001:db8:0:1::1%eth0", SECRET) is None


def test_what_is_remembered_of_strangers_is_bounded():
    access = Access("0.0.0.0", *FILES, KEY, clock=lambda: 0.0)
    for k in range(3000):
        access.refusal(f"10.0.{k // 250}.{k % 250}", "")
    assert len(access._wrong) == 1024


def test_no_log_has_the_key_or_a_wrong_one(caplog):
    caplog.set_level(logging.DEBUG)
    with guarded() as server:
        for key in (SECRET, OTHER):
            try:
                connect(server.url, PATIENT, ApiKey(key)).close()
            except UserError as error:
                assert key not in str(error)
    assert SECRET not in caplog.text and OTHER not in caplog.text


# -- our own clients ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trusted(monkeypatch):
    """The server's certificate is one that this machine trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", FILES[0])


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("by_file", [True, False])
def test_our_client_sends_the_key_of_its_address_or_of_the_environment(tmp_path, monkeypatch, by_file):
    secret_file(tmp_path / "key", SECRET.encode())
    option = f"?key_file={tmp_path / 'key'}" if by_file else ""
    monkeypatch.setenv("VLA_RL_API_KEY", OTHER if by_file else SECRET)
    with guarded() as server, closing(RemotePolicy(counting.spec(), server.url + option)) as policy:
        driver = Driver(CountingEnv(2), policy, None, "eval")
        driver.start([3, 4])
        assert driver.step().out.action[:, 0, 1].tolist() == [3, 4]
        policy.save_pretrained(tmp_path / "saved")
    assert SECRET not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.usefixtures("trusted")
def test_the_harness_protocol_is_guarded_alike(monkeypatch):
    monkeypatch.setenv("VLA_RL_API_KEY", SECRET)
    with serving(echo_policy(), access=Access("127.0.0.1", *FILES, KEY)) as server:
        with closing(RemotePolicy(counting.spec(), f"vla-eval+{server.url}")) as policy:
            assert follow(policy, CountingEnv(2), [1, 2]) > 0
        with pytest.raises(DisconnectedError, match="wants another API key"):
            connect(server.url, PATIENT, ApiKey(OTHER))


@pytest.mark.usefixtures("trusted")
def test_a_missing_key_is_said_with_the_cure():
    with (
        guarded() as server,
        pytest.raises(UserError, match=r"wants an API key \(key_file=FILE of its address or VLA_RL"),
    ):
        RemotePolicy(counting.spec(), server.url)


def test_a_key_is_not_sent_where_it_could_be_read():
    with pytest.raises(UserError, match="has no TLS, so the API key could be read on the way and is not sent"):
        connect("ws://192.0.2.1:8000", PATIENT, KEY)
    assert Address.parse("wss://robot?key_file=keys/robot").key_file == "keys/robot"


def test_a_certificate_that_is_not_trusted_is_refused():
    with guarded() as server, pytest.raises(UserError, match=r"no policy server answers at .*certificate"):
        connect(server.url, PATIENT, KEY)


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_who_speaks_no_tls_is_refused(caplog):
    with guarded() as server, socket.create_connection(server.server_address, timeout=PATIENCE) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"OK" not in b"".join(iter(lambda: _received(plain), b""))
        wait_until(lambda: "did not agree on TLS" in caplog.text)


def test_who_says_nothing_is_ended_and_keeps_nobody_out():
    with guarded(max_connections=4) as server, ExitStack() as opened:
        client = opened.enter_context(OpenpiStyle(server.url, SECRET, ssl=trusting()))
        server.limits = replace(PATIENT, opening_s=0.5)
        silent = [opened.enter_context(socket.create_connection(server.server_address, PATIENCE)) for _ in range(8)]
        assert client.infer(asked(seed=4))["actions"][0, 1] == 4
        assert [_received(sock) for sock in silent] == [b""] * 8, "one is waited for, seven are refused at once"
        server.limits = PATIENT
        later = opened.enter_context(let_in(server.url, SECRET, ssl=trusting()))
        assert later.infer(asked(seed=5))["actions"][0, 1] == 5


def test_one_address_takes_a_quarter_of_the_places_while_it_says_nothing():
    with serving_openpi(echo_policy(), max_connections=8) as server, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(server.server_address, PATIENCE)) for _ in range(3)]
        assert _received(silent[2]) == b""
        with server._lock:
            assert server._opening == {"127.0.0.1": 2}
        silent[0].close()
        client = opened.enter_context(let_in(server.url))
        assert client.infer(asked(seed=5))["actions"][0, 1] == 5


def let_in(url: str, *key: str, **options: Any) -> OpenpiStyle:
    """A client that tries until a place is free."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with suppress(OSError, EOFError, WebSocketException):
            return OpenpiStyle(url, *key, **options)
    pytest.fail("no place was ever free")


def _received(sock: socket.socket) -> bytes:
    """What comes next; nothing where the other side ended the connection, in whatever way."""
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""
