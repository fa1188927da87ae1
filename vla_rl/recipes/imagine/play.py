"""An imagined rollout steered from the keyboard, on a page that this machine alone serves to itself.

The server listens on 127.0.0.1, answers to the names localhost and 127.0.0.1 only (another site's name that is made to
point here is refused: DNS rebinding), and takes keys as POSTs of JSON from its own page only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.style import CSS
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.calibrated_model import recorded_initial_states
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.imagine.steering import Key, Steering, View, idle_action

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
    env = world_models.ImaginedEnv(calibrated.model, pool, 1, calibrated.limits, config)
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


_CSS = """
body { max-width: 76rem; padding-top: 2rem; }
header { margin-bottom: 1.2rem; }
.stage { display: grid; grid-template-columns: minmax(0, 1.25fr) minmax(17rem, 1fr); gap: 1rem; align-items: start; }
@media (max-width: 50rem) { .stage { grid-template-columns: 1fr; } }
.side { display: grid; gap: 1rem; }
.screen { padding: 0; overflow: hidden; border: 3px solid var(--line); line-height: 0; background: #181b20; }
.screen.good { border-color: var(--good); } .screen.bad { border-color: var(--bad); }
canvas { width: 100%; max-height: 78vh; object-fit: contain; image-rendering: pixelated; }
.instruction { font-size: 1.25rem; font-weight: 650; letter-spacing: -0.01em; line-height: 1.3; margin: 0; }
.soft { color: var(--soft); font-size: 0.875rem; }
.meter { margin-top: 0.8rem; }
.meter > div:first-child { display: flex; justify-content: space-between; font-size: 0.875rem; color: var(--soft); }
.meter b { color: var(--ink); }
.track { position: relative; height: 10px; border-radius: 5px; margin-top: 0.25rem; overflow: hidden;
  background: color-mix(in srgb, var(--soft) 18%, transparent); }
.track i { position: absolute; inset: 0 auto 0 0; width: 0; background: var(--c1); border-radius: 5px;
  transition: width 90ms linear; }
.track.good i { background: var(--good); } .track.bad i { background: var(--bad); }
.track u { position: absolute; left: 50%; top: 0; bottom: 0; width: 2px; background: var(--ink); }
.end { margin: 0.9rem 0 0; padding: 0.6rem 0.8rem; border-radius: 8px; line-height: 1.4; font-weight: 600;
  background: color-mix(in srgb, var(--bad) 14%, transparent); }
.end.good { background: color-mix(in srgb, var(--good) 16%, transparent); }
.end:empty, .remark:empty { display: none; }
.remark { color: var(--soft); margin: 0.7rem 0 0; line-height: 1.4; }
.keys { display: grid; grid-template-columns: auto 1fr; gap: 0.3rem 0.9rem; align-items: center; font-size: 0.875rem; }
.keys .nothing { opacity: 0.45; }
kbd { font: 0.8125rem/1 ui-monospace, "SF Mono", Menlo, Consolas, monospace; color: inherit; cursor: pointer;
  border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 6px; background: var(--page);
  padding: 0.3rem 0.45rem; margin-right: 0.25rem; display: inline-block; min-width: 1.75rem; text-align: center; }
kbd:active { border-bottom-width: 1px; transform: translateY(1px); }
"""

_SCRIPT = """
const known = new Set([...document.querySelectorAll('kbd')].map(cap => cap.dataset.key));
const at = id => document.getElementById(id);
const percent = x => x === null ? '–' : (100 * x).toFixed(0) + '%';
let busy = false;

function paint(shape, text) {
  const [height, width] = shape, bytes = atob(text), canvas = at('picture');
  canvas.width = width; canvas.height = height;
  const image = new ImageData(width, height);
  for (let i = 0, j = 0; i < bytes.length; i += 3, j += 4) {
    for (let c = 0; c < 3; c++) image.data[j + c] = bytes.charCodeAt(i + c);
    image.data[j + 3] = 255;
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
}

async function show(view) {
  for (const [i, picture] of view.pictures.entries()) {
    if (i) await new Promise(done => setTimeout(done, 110));
    paint(view.shape, picture);
  }
  const won = view.cause === 'success', over = view.cause !== '';
  at('screen').className = 'card screen' + (over ? (won ? ' good' : ' bad') : '');
  at('instruction').textContent = view.instruction;
  at('step').textContent = `rollout ${view.episode + 1}, control step ${view.step} of ${view.steps}`
    + (view.grip === null ? '' : `, gripper ${view.grip > 0 ? '+' : ''}${view.grip}`);
  for (const name of ['done', 'success_probability']) {
    at(name).textContent = percent(view[name]);
    at(name + '-bar').style.width = 100 * (view[name] ?? 0) + '%';
  }
  const mode_uncertainty = view.limit !== null && view.uncertainty > view.limit;
  const share = view.limit ? view.uncertainty / view.limit : mode_uncertainty ? 2 : 0;
  at('uncertainty').textContent = view.uncertainty === null ? '–'
    : view.uncertainty.toFixed(3) + (view.limit === null ? ', no limit' : ' of ' + view.limit.toFixed(3));
  at('uncertainty-bar').style.width = Math.min(100, 50 * share) + '%';
  at('uncertainty-track').className = 'track' + (mode_uncertainty ? ' bad' : '');
  at('end').textContent = view.end;
  at('end').className = 'end' + (won ? ' good' : '');
  at('remark').textContent = view.remark;
}

async function ask(path, options) {
  if (busy) return;
  busy = true;
  try {
    const answer = await fetch(path, options);
    if (answer.ok) await show(await answer.json());
    else at('remark').textContent = await answer.text();
  } catch (error) {
    at('remark').textContent = 'No answer: vla-rl imagine play has ended.';
  }
  busy = false;
}

const press = key => ask('/press', {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({key})});

document.addEventListener('keydown', event => {
  const key = event.key.toLowerCase();
  if (!known.has(key) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  press((event.shiftKey && !'rbp '.includes(key) ? 'shift+' : '') + key);
});
for (const cap of document.querySelectorAll('kbd')) cap.addEventListener('click', () => press(cap.dataset.key));
ask('/view');
"""

_BODY = """
<div class="stage">
<div class="card screen" id="screen">
<canvas id="picture" width="1" height="1" aria-label="the imagined rollout"></canvas></div>
<div class="side">
<div class="card"><p class="instruction" id="instruction"></p><div class="soft" id="step"></div>
<div class="meter"><div><span>the task is done</span><b id="done"></b></div>
<div class="track good"><i id="done-bar"></i></div></div>
<div class="meter"><div><span>will be done, if it goes on as in the recordings</span>
<b id="success_probability"></b></div>
<div class="track"><i id="success_probability-bar"></i></div></div>
<div class="meter"><div><span>uncertainty, and its limit in the middle</span><b id="uncertainty"></b></div>
<div class="track" id="uncertainty-track"><i id="uncertainty-bar"></i><u></u></div></div>
<p class="end" id="end" aria-live="polite"></p><p class="remark" id="remark" aria-live="polite"></p></div>
<div class="card keys">KEYS</div>
</div></div>
"""

_CAPS = {" ": "space", "pageup": "PgUp", "pagedown": "PgDn"}
_CAPS |= {"arrowright": "→", "arrowleft": "←", "arrowup": "↑", "arrowdown": "↓"}


def page(run: str, keys: Sequence[Key], policy: str) -> str:
    """The page for a rollout of ``run``; ``policy`` names who acts on P, "" for nobody."""
    rows = [_row(key.keys, key.does, key.entry is None) for key in keys]
    rows += [
        _row(("p",), f"the policy {policy!r} decides" if policy else "nothing: this run has no policy", not policy),
        _row(("b",), "back: take the last key's steps back"),
        _row(("r",), "the next rollout"),
    ]
    rows.append('<span></span><span class="soft">With Shift a quarter of a move. Hold a key to repeat it.</span>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Steer an imagined rollout</title>\n<style>{CSS}{_CSS}</style>\n</head>\n<body>\n"
        f"<header><h1>Steer an imagined rollout</h1><p>of the world model in <code>{escape(run)}</code></p></header>\n"
        f"<main>{_BODY.replace('KEYS', ''.join(rows))}</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def security_policy() -> str:
    """What the page's Content-Security-Policy allows: this style, this script, and questions to its own server."""
    style, script = (_digest(text) for text in (CSS + _CSS, _SCRIPT))
    return (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _row(keys: Sequence[str], does: str, nothing: bool = False) -> str:
    caps = "".join(f'<kbd data-key="{escape(key)}">{escape(_CAPS.get(key, key.upper()))}</kbd>' for key in keys)
    return f"<span>{caps}</span><span{' class=nothing' * nothing}>{escape(does)}</span>"
