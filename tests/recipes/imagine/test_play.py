"""The page on which an imagined rollout is steered serves keys and pictures to itself, and to nobody else."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE
from tests.recipes.imagine.runs import run_folder, steered
from tests.world_models.small_models import SIDE
from vla_rl.cli import main
from vla_rl.cli.imagine import play
from vla_rl.contract.errors import UserError
from vla_rl.recipes.imagine.play import Steering, serve
from vla_rl.recipes.imagine.recipe import SavedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SavedRun:
    return SavedRun.load(run_folder(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def hands(run) -> Steering:
    return steered(run, 8)


# -- the server --------------------------------------------------------------------------------------------------------


class Browser:
    """Requests to a server as its page sends them, with the changes of a test."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[HTTPResponse, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer, answer.read()

    def press(self, key: Any, **headers: str) -> tuple[HTTPResponse, bytes]:
        given = {"Content_Type": "application/json", **headers}
        return self.ask("POST", "/press", json.dumps({"key": key}).encode(), **given)

    def view(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("GET", "/view")[1]))


@contextmanager
def served(steering: Steering) -> Iterator[Browser]:
    with serve(steering, "runs/<a>", "best", 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Browser(server.server_port)
        finally:
            server.shutdown()
            thread.join()


def test_a_key_sent_over_a_socket_is_pressed_and_what_is_to_be_seen_comes_back(run, hands):
    with served(hands) as browser:
        assert browser.view()["step"] == 0
        answer, body = browser.press("p", Origin=f"http://127.0.0.1:{browser.port}")
        view = json.loads(body)
        assert answer.status == 200 and view["step"] == 2 and view["shape"] == [SIDE, SIDE]
        pictures = [np.frombuffer(base64.b64decode(text), np.uint8).reshape(SIDE, SIDE, 3) for text in view["pictures"]]
        np.testing.assert_array_equal(pictures, hands.view.pictures)
        assert view["uncertainty"] == pytest.approx(hands.view.uncertainty) and view["limit"] == 1e9
        refreshed = browser.view()
        assert refreshed["pictures"] == view["pictures"][-1:] and refreshed["step"] == 2
        answer, body = browser.press("x")
        assert answer.status == 400 and b"means nothing here" in body


def test_the_page_loads_nothing_and_may_run_its_own_script_alone(hands):
    with served(hands) as browser:
        answer, body = browser.ask("GET", "/", Host=f"localhost:{browser.port}")
    html, rules = body.decode(), answer.headers["Content-Security-Policy"]
    assert answer.status == 200 and rules.startswith("default-src 'none'; ") and "unsafe" not in rules
    for tag in ("style", "script"):
        (nonce,) = re.findall(rf'<{tag} nonce="(.*?)">', html)
        assert f"{tag}-src 'nonce-{nonce}'" in rules
    assert not re.search(r"\b(src|href|style|on\w+)=", re.sub(r"<script.*?</script>", "", html, flags=re.S))
    assert "runs/&lt;a&gt;" in html and "<a>" not in html
    caps = set(re.findall(r'<kbd data-key="([^"]+)">', html))
    assert caps == {name for key in hands.keys for name in key.keys} | {"p", "b", "r"}
    assert html.count("nothing: no action is called y") == 2
    assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "localhost:80:x", "localhost:", ""],
)
def test_other_names_of_this_machine_are_refused(hands, host):
    with served(hands) as browser:
        for answer, body in (browser.ask("GET", "/view", Host=host), browser.press("d", Host=host)):
            assert answer.status == 403 and b"only a page of this machine" in body
    assert hands.view.step == 0


def test_pages_of_other_sites_press_no_key(hands):
    with served(hands) as browser:
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{browser.port + 1}"):
            assert browser.press("d", Origin=origin)[0].status == 403
        assert browser.press("d", Content_Type="text/plain")[0].status == 415
        assert browser.ask("OPTIONS", "/press", Origin="http://evil.example")[0].status == 501
    assert hands.view.step == 0


def test_keys_are_posted_and_nothing_else_is_taken_for_one(hands):
    with served(hands) as browser:
        assert browser.ask("GET", "/press?key=d")[0].status == browser.ask("GET", "/press")[0].status == 404
        assert browser.ask("POST", "/view", b"{}", Content_Type="application/json")[0].status == 404
        assert browser.ask("PUT", "/press", b"{}")[0].status == 501
        for body in (b"", b"[]", b"{}", b'{"key": 1}', b"{", b"\xff", b'"d"'):
            assert browser.ask("POST", "/press", body, Content_Type="application/json")[0].status == 400
        assert browser.press("d" * 300)[0].status == 400
        assert browser.press("d")[0].status == 200
    assert hands.view.step == 1


def test_keys_pressed_at_once_come_one_after_the_other(run):
    hands = steered(run, 40)
    with served(hands) as browser:
        threads = [threading.Thread(target=browser.press, args=("d",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    alone = steered(run, 40)
    for _ in range(8):
        alone.press("d")
    np.testing.assert_array_equal(hands.view.pictures, alone.view.pictures)
    assert (hands.view.step, hands.view.uncertainty) == (8, alone.view.uncertainty)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is Python's, though a shell has started the tests in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_command_serves_until_ctrl_c_and_frees_the_port(run, capsys, interruptible):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be served on .*in use.*{port + 1}"):
            play([str(run.folder), "--port", str(port)])
    steps: list[int] = []
    over = threading.Event()

    def use() -> None:
        browser = Browser(port)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                steps.append(json.loads(browser.press("d")[1])["step"])
                break
            except OSError:
                threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        while not over.wait(60.0):  # one that comes while Python finalises an object is lost; people press again
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=use)
    thread.start()
    with pytest.raises(SystemExit, match="130"):
        main(["imagine", "play", str(run.folder), "--port", str(port)])
    over.set()
    assert re.search(r"vla-rl: stopped playing; nothing in .*run was changed\.\n$", capsys.readouterr().err)
    thread.join()
    assert steps == [1]
    socket.create_server(("127.0.0.1", port)).close()
