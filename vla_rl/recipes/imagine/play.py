"""An imagined rollout steered from the keyboard, on a page that this machine alone serves to itself.

The server listens on 127.0.0.1, answers to the names localhost and 127.0.0.1 only (another site's name that is made to
point here is refused: DNS rebinding), and takes keys as POSTs of JSON from its own page only.
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.play_page import page, security_policy
from vla_rl.recipes.imagine.replays import recorded_initial_states
from vla_rl.recipes.imagine.saved_run import SavedRun
from vla_rl.recipes.imagine.steering import Steering, View, idle_action

_POLICIES = ("best", "start")  # who acts on P: the first of these checkpoints that there is
_LONGEST = 200  # bytes of a key
_HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Play:
    """Steer imagined rollouts of a run from the keyboard, on a page of this machine.

    They begin like the held-out episodes and end as in RL, except for the horizon.
    """

    port: int = 8000  # 0: any that is free
    steps: int = 0  # control steps of a rollout; 0: as many as an episode of the simulator has


def steering_of(run: SavedRun, steps: int = 0) -> tuple[Steering, str]:
    """A steered rollout of ``run``, ``steps`` long, and the name of its policy, "" for none.

    Raises UserError when the policy was trained for another environment.
    """
    calibrated, spec = run.calibrated, run.calibrated.model.spec
    config = replace(
        calibrated.imagination, horizon=steps or spec.time_limit, deadline=None, keyframe_share=0.0, batch_size=1
    )
    # Outcome and uncertainty are shown after every step, so every step is denoised as calls are.
    config = replace(config, mid_call_steps=0)
    pool = recorded_initial_states(calibrated.model, run.held_out)
    env = world_models.make_env(calibrated.model, pool, 1, calibrated.limits, config)
    first = run.held_out.action[[begin for begin, _ in run.held_out.spans()]]
    name = next((name for name in _POLICIES if (run.folder / "checkpoints" / name).exists()), "")
    policy = load_policy(Path(run.folder, "checkpoints", name), env.spec) if name else None
    return Steering(env, run.held_out.count, idle_action(spec.action, first), policy), name


def serve(steering: Steering, run: str, policy: str, port: int) -> ThreadingHTTPServer:
    """The server on ``port``, not yet serving; closing it frees the port.

    Raises UserError when the port is taken or forbidden.
    """

    class Bound(_Handler):
        shown = page(run, steering.keys, policy).encode()
        hands, lock = steering, threading.Lock()

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Bound)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise UserError(
            f"port {port} cannot be served on ({why}), so there would be no page; choose another one, for example "
            f"--port {port + 1 if 1023 < port < 65535 else 8001}, or --port 0 for any that is free."
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /view the present view, POST /press {"key": ...} answers with the view after that key."""

    shown: bytes
    hands: Steering
    lock: threading.Lock
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "vla-rl", ""
    timeout = 60  # seconds; browsers open connections that they may never use

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        if self.path == "/":
            self._answer(HTTPStatus.OK, self.shown, "text/html; charset=utf-8")
        elif self.path == "/view":
            with self.lock:
                view = self.hands.view
            self._answer(HTTPStatus.OK, _json(replace(view, pictures=view.pictures[-1:])), "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path!r}; see /.")

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        if self.path != "/press":
            self._refuse(HTTPStatus.NOT_FOUND, f"nothing can be done at {self.path!r}; keys go to /press.")
        elif self.headers.get_content_type() != "application/json":  # what other sites can send unasked is never this
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a key comes as application/json.")
        elif not (length := self.headers.get("Content-Length", "")).isdecimal() or int(length) > _LONGEST:
            self._refuse(HTTPStatus.BAD_REQUEST, f"a key comes with its length, at most {_LONGEST} bytes.")
        else:
            self._press(self.rfile.read(int(length)))

    def _press(self, body: bytes) -> None:
        try:
            key = json.loads(body)["key"]
            if not isinstance(key, str):
                raise TypeError("it is no text")
        except (ValueError, TypeError, KeyError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f'no key could be read ({error}); send {{"key": "w"}}.')
            return
        try:
            with self.lock:
                view = self.hands.press(key)
        except UserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._answer(HTTPStatus.OK, _json(view), "application/json")

    def _is_ours(self) -> bool:
        """Whether the request was sent to this machine by name, and by no other site's page; refuses it otherwise."""
        host = self.headers.get("Host", "")
        name, _, port = host.partition(":")
        origin = self.headers.get("Origin", f"http://{host}")
        if name in _HOSTS and (port.isdecimal() or host == name) and origin == f"http://{host}":
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "only a page of this machine, as localhost or 127.0.0.1, is answered.")
        return False

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.close_connection = True  # a body that was not read must not be taken for the next request
        self._answer(status, sentence.encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"Content-Security-Policy": security_policy(), "X-Content-Type-Options": "nosniff"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line per key helps nobody."""


def _json(view: View) -> bytes:
    pictures = [base64.b64encode(np.ascontiguousarray(picture).tobytes()).decode("ascii") for picture in view.pictures]
    fields = {name: value for name, value in asdict(view).items() if name != "pictures"}
    return json.dumps({**fields, "shape": view.pictures.shape[1:3], "pictures": pictures}, allow_nan=False).encode()
