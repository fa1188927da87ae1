"""A steered imagined rollout: keys are bound to actions by name, back restores a step, and one page presses them."""

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
from dataclasses import asdict, replace
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE
from tests.recipes.imagine.runs import CALM, FAR, changed, one_env, push, run_folder, steered, world_model
from tests.world_models.small_models import SIDE
from vla_rl.cli import main
from vla_rl.cli.imagine import play
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.imagine.play import Steering, View, idle_action, keys_of, serve, steering_of
from vla_rl.recipes.imagine.recipe import SavedRun
from world_models.config import Limits

OPEN, CLOSED = -2.0, 1.0  # of "grip" in these runs; most recordings start closer to the first


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SavedRun:
    return SavedRun.load(run_folder(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def hands(run) -> Steering:
    return steered(run, 8)


def same(one: View, other: View) -> bool:
    """Whether both have the same view."""
    a, b = ({**asdict(view), "pictures": view.pictures[-1].tolist()} for view in (one, other))
    return a == b


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_do_what_actions_are_called_or_say_they_do_nothing():
    high, low = (0.03, 0.03, 0.04, 1), (-0.03, -0.03, -0.02, -1)
    lift = ArraySpec((4,), "float32", low, high, "m,m,m,1", "", ("dx", "dy", "dz", "grip"))
    found = {name: (key.entry, key.sign, key.does) for key in keys_of(lift) for name in key.keys}
    for names, entry, sign, does in (
        (("arrowright", "d"), 0, 1, "dx +0.03 m"),
        (("arrowleft", "a"), 0, -1, "dx -0.03 m"),
        (("arrowup", "w"), 1, 1, "dy +0.03 m"),
        (("arrowdown", "s"), 1, -1, "dy -0.03 m"),
        (("q", "pageup"), 2, 1, "dz +0.04 m"),
        (("e", "pagedown"), 2, -1, "dz -0.02 m"),
        ((" ",), 3, 0, "grip: the other way"),
    ):
        assert all(found[name] == (entry, sign, does) for name in names)
    mixed = replace(lift, names=("gripper_position", "delta_z", "yaw", "X"), unit="")
    found = {name: (key.entry, key.does) for key in keys_of(mixed) for name in key.keys}
    assert found[" "][0] == 0 and found["q"][0] == 1 and found["d"] == (3, "X +1")
    assert found["w"] == found["s"] == (None, "nothing: no action is called y")
    assert all(key.entry is None for key in keys_of(replace(lift, names=())))


@pytest.mark.parametrize(("first", "held"), [([-0.8, -1.9, 0.9], OPEN), ([-0.2, 0.8, -1.9], CLOSED)])
def test_the_gripper_begins_as_in_most_recordings(first, held):
    action = world_model().spec.action
    assert idle_action(action, np.array([[0.4, grip] for grip in first])).tolist() == [0.0, held]
    above = replace(action, low=(0.1, -2.0))  # where standing still is not allowed, the nearest to it
    assert idle_action(above, np.array([[0.4, -2.0]]))[0] == pytest.approx(0.1)


def test_every_key_is_one_control_step_of_its_action(run, hands):
    """The same actions by hand from the same initial state: equal pictures, probabilities and uncertainty."""
    keys = ("d", "shift+ArrowLeft", " ", "A", " ")
    actions = [(0.5, OPEN), (-0.125, OPEN), (0.0, CLOSED), (-0.5, CLOSED), (0.0, OPEN)]
    env = one_env(run, horizon=8)
    env.reset(np.zeros(1, int), [0])
    np.testing.assert_array_equal(hands.view.pictures[0], run.held_out.images["front"][0])
    assert hands.view.instruction == run.calibrated.model.spec.tasks[run.held_out.task[0]]
    assert hands.view.uncertainty is None
    for i, (key, action) in enumerate(zip(keys, actions, strict=True)):
        view = hands.press(key)
        obs = env.step(np.array(action, np.float32)[None, None]).obs
        np.testing.assert_array_equal(view.pictures, obs.images["front"])
        assert [view.done, view.success_probability] == env.outcome[0, [0, 2]].tolist()
        assert view.uncertainty == float(env.uncertainty[0])
        assert (view.step, view.steps, view.cause, view.grip) == (i + 1, 8, "", action[1])
        assert view.limit == (1e9 if i < 3 else 2e9)  # of the call that the step belongs to; three steps are one


def test_each_direction_has_its_own_bound_and_shift_a_share(tmp_path):
    run = SavedRun.load(run_folder(tmp_path / "run", names=("yaw", "x"), policy=False))
    hands, env = steered(run, 8), one_env(run)
    env.reset(np.zeros(1, int), [0])
    for key, action in (("a", -2.0), ("d", 1.0), ("shift+a", -0.5), ("shift+d", 0.25)):
        view = hands.press(key)
        picture = env.step(np.array([[[0.0, action]]], np.float32)).obs.images["front"]
        np.testing.assert_array_equal(view.pictures, picture)
        assert view.grip is None
    assert hands.press(" ").remark == "That key does nothing: no action is called grip."


# -- back, next, the policy --------------------------------------------------------------------------------------------


def test_the_same_keys_give_the_same_again_after_going_back(hands):
    """Bit for bit, from the middle of a call too, with the gripper as it was."""
    keys = ["d", " ", "a", "p", "d"]  # a call is three steps
    views = [hands.view, *(hands.press(key) for key in keys)]
    for view in views[-2::-1]:
        assert same(hands.press("b"), view)
    assert hands.press("b").remark.startswith("There is nothing to take back")
    other = [hands.press(key) for key in ("a", " ", "d", "p", "a")]
    assert not any(same(one, two) for one, two in zip(views[1:], other, strict=True))
    for _ in keys:
        hands.press("b")
    assert all(same(hands.press(key), view) for key, view in zip(keys, views[1:], strict=True))


def test_the_next_rollout_begins_like_the_next_episode(run, hands):
    """And after the last one like the first."""
    hands.press(" ")
    for i in [*range(1, 10), 0]:
        view = hands.press("r")
        begin = run.held_out.spans()[i][0]
        assert (view.episode, view.step, view.uncertainty, view.grip) == (i, 0, None, OPEN)
        np.testing.assert_array_equal(view.pictures[0], run.held_out.images["front"][begin])
        assert view.instruction == run.calibrated.model.spec.tasks[run.held_out.task[begin]]
        assert hands.press("b").remark.startswith("There is nothing to take back")  # nor the imagined rollout before


def test_the_policy_decides_once_and_is_shown_step_by_step(run, hands):
    """On what the imagined rollout shows; the gripper stays as the policy left it."""
    env = one_env(run, horizon=8)
    obs = env.reset(np.zeros(1, int), [0])
    for _ in range(2):
        view = hands.press("p")
        step = env.step(push(obs), observe="all")
        np.testing.assert_array_equal(view.pictures, [frame.images["front"][0] for frame in step.frames])
        obs = step.obs
    assert view.step == 4 and view.grip == CLOSED
    assert hands.press("b").grip == CLOSED and hands.press("b").grip == OPEN


class Dicing(FunctionPolicy):
    """A decision is a throw of its generator, and counts those before it in its imagined rollout."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, push)
        self.throws: list[list[float]] = []

    def initial_state(self, num_envs: int) -> dict[str, Any]:
        return {"count": torch.zeros(num_envs)}

    def act(self, features: Any, state: Any, mode: Any, generator: Any) -> tuple[ActionOut, Any]:
        assert mode == "eval"
        action = torch.full((1, 2, 2), 0.1 * float(state["count"][0]))
        action[..., 0] = 0.2 * torch.rand(1, 2, generator=generator)
        self.throws.append(action[0, 0].tolist())
        return ActionOut(action, action, torch.zeros(1)), {"count": state["count"] + 1}


def test_a_decision_that_was_taken_back_is_made_again(run):
    """The policy's state goes back as well, and its noise is that of the time step: new in every one."""
    policy = Dicing(run.calibrated.model.spec)
    hands = Steering(steered(run, 12).env, 10, np.array([0.0, OPEN], np.float32), policy)
    views = [hands.press(key) for key in "ppp"]
    again = [hands.press(key) for key in "bbpp"][2:]
    assert all(map(same, again, views[1:]))
    hands.press("r")
    hands.press("p")
    dice, counts = np.array(policy.throws).T
    np.testing.assert_allclose(counts, [0, 0.1, 0.2, 0.1, 0.2, 0], atol=1e-6)
    assert dice[3:5].tolist() == dice[1:3].tolist() and len({*dice}) == 4


# -- ends --------------------------------------------------------------------------------------------------------------


def test_too_uncertain_a_rollout_ends_at_its_call_and_back_goes_on(run):
    hands = steering_of(changed(run, limits=Limits((1e9, 1e-6))), 8)[0]
    views = [hands.press("d") for _ in range(6)]
    assert [view.cause for view in views] == [""] * 5 + ["uncertainty"]
    assert views[3].uncertainty > views[3].limit == 1e-6 and "too uncertain" in views[5].end
    for key in ("d", "p", " "):
        idle = hands.press(key)
        assert idle.step == 6 and idle.remark.startswith("This rollout has ended") and idle.end == views[5].end
    assert same(hands.press("b"), views[4]) and hands.press("r").end == ""


@pytest.mark.parametrize(
    ("numbers", "cause", "says"),
    [
        ({"success_threshold": 0.0}, "success", "is done"),
        ({"failure_threshold": 0.0}, "failed", "has failed"),
        ({}, "time_limit", "Time is up"),
    ],
)
def test_an_end_is_reported_in_words(run, numbers, cause, says):
    hands = steering_of(changed(run, imagination=replace(CALM, **numbers, deadline=2), limits=FAR), 4)[0]
    views = [hands.press("d") for _ in range(4)]
    last = next(view for view in views if view.cause)
    # The deadline that a learner has is not for people: at the end of the first call, or of the time.
    assert (last.cause, last.step) == (cause, 4 if cause == "time_limit" else 3) and says in last.end


# -- the page ----------------------------------------------------------------------------------------------------------


class Browser:
    """Requests to a server as its page sends them, with the changes of a test."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[HTTPResponse, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer, answer.read()

    def press(self, key: Any, **headers: str) -> tuple[int, Any]:
        given = {"Content_Type": "application/json", **headers}
        answer, body = self.ask("POST", "/press", json.dumps({"key": key}).encode(), **given)
        return answer.status, json.loads(body) if answer.status == 200 else body

    def view(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("GET", "/view")[1]))


@contextmanager
def served(steering: Steering) -> Iterator[Browser]:
    with serve(steering, "runs/<a>", "best", 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        server.start()
        yield Browser(server.server_port)
        server.close()


def test_a_key_is_pressed_and_what_is_seen_comes_back(run, hands):
    with served(hands) as browser:
        assert browser.view()["step"] == 0
        status, view = browser.press("p", Origin=f"http://127.0.0.1:{browser.port}")
        assert status == 200 and view["step"] == 2 and view["shape"] == [SIDE, SIDE]
        pictures = [np.frombuffer(base64.b64decode(text), np.uint8).reshape(SIDE, SIDE, 3) for text in view["pictures"]]
        np.testing.assert_array_equal(pictures, hands.view.pictures)
        assert view["uncertainty"] == pytest.approx(hands.view.uncertainty) and view["limit"] == 1e9
        refreshed = browser.view()
        assert refreshed["pictures"] == view["pictures"][-1:] and refreshed["step"] == 2
        status, said = browser.press("x")
        assert status == 400 and b"means nothing here" in said
        html = browser.ask("GET", "/", Host=f"localhost:{browser.port}")[1].decode()
    assert "runs/&lt;a&gt;" in html and "<a>" not in html
    caps = set(re.findall(r'<kbd data-key="([^"]+)">', html))
    assert caps == {name for key in hands.keys for name in key.keys} | {"p", "b", "r"}
    assert html.count("nothing: no action is called y") == 2


def test_other_sites_and_what_is_no_key_press_nothing(hands):
    """What a page in a browser could be made to send, and what is not posted as a key."""
    with served(hands) as browser:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "localhost:80:x", "localhost:", ""):
            assert browser.ask("GET", "/view", Host=host)[0].status == browser.press("d", Host=host)[0] == 403
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{browser.port + 1}"):
            assert browser.press("d", Origin=origin)[0] == 403
        assert browser.press("d", Content_Type="text/plain")[0] == 415
        for method, path, status in (("OPTIONS", "/press", 501), ("PUT", "/press", 501), ("GET", "/press?key=d", 404)):
            assert browser.ask(method, path, b"{}" if method == "PUT" else None)[0].status == status
        assert browser.ask("POST", "/view", b"{}", Content_Type="application/json")[0].status == 404
        for body in (b"", b"[]", b"{}", b'{"key": 1}', b"{", b"\xff", b'"d"', json.dumps({"key": "d" * 300}).encode()):
            assert browser.ask("POST", "/press", body, Content_Type="application/json")[0].status == 400
        assert hands.view.step == 0 and browser.press("d")[0] == 200
    assert hands.view.step == 1


def test_keys_pressed_at_once_come_one_after_the_other(run):
    hands, alone = steered(run, 40), steered(run, 40)
    with served(hands) as browser:
        threads = [threading.Thread(target=browser.press, args=("d",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _ in threads:
        alone.press("d")
    np.testing.assert_array_equal(hands.view.pictures, alone.view.pictures)
    assert (hands.view.step, hands.view.uncertainty) == (4, alone.view.uncertainty)


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
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not steps:
            try:
                steps.append(Browser(port).press("d")[1]["step"])
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
