"""An imagined rollout steered from the keyboard, on a page that this machine alone serves to itself.

GET /view is the present view, POST /press {"key": ...} answers with the view after that key.
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.pages import Answer, PageAddress, PageServer, render
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.calibrated_model import recorded_initial_states
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.imagine.steering import Steering, View, idle_action

_POLICIES = ("best", "start")  # who acts on P: the first of these checkpoints that there is
_CAPS = {" ": "space", "pageup": "PgUp", "pagedown": "PgDn"}
_CAPS |= {"arrowright": "→", "arrowleft": "←", "arrowup": "↑", "arrowdown": "↓"}


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


def serve(steering: Steering, run: str, policy: str, port: int) -> PageServer:
    """The server of a rollout of ``run`` on ``port``, not yet serving; closing it frees the port.

    ``policy`` names who acts on P, "" for nobody.  Raises UserError when the port is taken or forbidden.
    """
    lock = threading.Lock()

    def view() -> Answer:
        with lock:
            present = steering.view
        return "application/json", _json(replace(present, pictures=present.pictures[-1:]))

    def press(given: JsonObject) -> Answer:
        key = given.get("key")
        if not isinstance(key, str):
            raise UserError('no key could be read, so nothing was pressed; send {"key": "w"}.')
        with lock:
            return "application/json", _json(steering.press(key))

    keys = [{"names": key.keys, "does": key.does, "acts": key.entry is not None} for key in steering.keys]
    acts = f"the policy {policy!r} decides" if policy else "nothing: this run has no policy"
    keys += [
        {"names": ("p",), "does": acts, "acts": bool(policy)},
        {"names": ("b",), "does": "back: take the last key's steps back", "acts": True},
        {"names": ("r",), "does": "the next rollout", "acts": True},
    ]
    shown = {"subtitle": f"of the world model in `{run}`", "keys": keys, "caps": _CAPS}
    return PageServer(
        PageAddress(port=port),
        lambda nonce: render("play.html", "Steer an imagined rollout", nonce, **shown),
        {"/view": view},
        {"/press": press},
    )


def _json(view: View) -> bytes:
    pictures = [base64.b64encode(np.ascontiguousarray(picture).tobytes()).decode("ascii") for picture in view.pictures]
    fields = {name: value for name, value in asdict(view).items() if name != "pictures"}
    return json.dumps({**fields, "shape": view.pictures.shape[1:3], "pictures": pictures}, allow_nan=False).encode()
