"""An imagined rollout steered key by key, from a page that this machine alone serves to itself.

Keys are named as browsers name them, in small letters ("arrowright", "w", " "); "shift+" before a key that moves makes
the move small.  What a key does follows from the names of the action's entries: x, y, z (also as dx, delta_x) and one
that begins with "grip".  Right is +x, up (away) is +y.
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import ArraySpec, Observation, Snapshot
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Policy, State, encode_observation
from vla_rl.evaluation.video import mosaic
from vla_rl.pages import Answer, PageAddress, PageServer, render
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.calibrated_model import recorded_initial_states
from vla_rl.recipes.imagine.recipe import SavedRun

FINE = 0.25  # of a whole move, with Shift
_MOVES = (
    (("arrowright", "d"), "x", 1),
    (("arrowleft", "a"), "x", -1),
    (("arrowup", "w"), "y", 1),
    (("arrowdown", "s"), "y", -1),
    (("q", "pageup"), "z", 1),
    (("e", "pagedown"), "z", -1),
)
_PREFIXES = ("delta_", "d_", "d")
_ENDS = {
    "success": "The task is done.",
    "failed": "The task has failed.",
    "too_late": "Time is up: the task has failed.",
    "time_limit": "Time is up.",
    "uncertainty": "The prediction has become too uncertain, so the rollout is truncated.",
}
_FLIPPED = "With other noise the same actions do not succeed, so this success does not count."


@dataclass(frozen=True)
class Key:
    """``keys`` that do the same: ``entry`` of the action to its bound in the direction ``sign``; None: nothing."""

    keys: tuple[str, ...]
    does: str
    entry: int | None = None
    sign: int = 0


def keys_of(action: ArraySpec) -> tuple[Key, ...]:
    """What the keys for moves do to an ``action``, the one that toggles the gripper (sign 0) last."""
    low, high = _bounds(action)
    units = action.unit.split(",") if "," in action.unit else [action.unit] * len(low)
    found = []
    for keys, axis, sign in _MOVES:
        entry = _entry(action, axis)
        if entry is None:
            found.append(Key(keys, f"nothing: no action is called {axis}"))
            continue
        size, unit = (high if sign > 0 else low)[entry], units[entry] if entry < len(units) else ""
        found.append(Key(keys, f"{action.names[entry]} {size:+g} {unit}".rstrip(), entry, sign))
    entry = _entry(action, "grip")
    does = "nothing: no action is called grip" if entry is None else f"{action.names[entry]}: the other way"
    return (*found, Key((" ",), does, entry))


def idle_action(action: ArraySpec, first: np.ndarray) -> np.ndarray:
    """float32 [D]: what no key changes: nothing, but the gripper as in most of the recorded ``first`` [N,D] actions."""
    low, high = _bounds(action)
    idle = np.clip(np.zeros_like(low), low, high)
    return _gripping(idle, action, np.median(first, 0))


@dataclass(frozen=True)
class View:
    """The state of the rollout after a key; before the first step there is no outcome and no uncertainty.

    pictures             uint8 [n,h,w,3]  since the key was pressed, the present one last; cameras beside each other
    episode              which recorded episode it began in
    done                 probability that the task is done
    success_probability  that it will be, with the behaviour in the data
    uncertainty          of the prediction; beyond ``limit`` at the end of a call, the rollout is truncated
    cause                why the rollout ended, "" while it goes on; ``end`` says it in words
    remark               what the last key did not do
    grip                 the gripper's part of the next action, None without one
    """

    pictures: np.ndarray
    instruction: str
    episode: int
    step: int
    steps: int
    done: float | None = None
    success_probability: float | None = None
    uncertainty: float | None = None
    limit: float | None = None
    cause: str = ""
    end: str = ""
    remark: str = ""
    grip: float | None = None


@dataclass(frozen=True)
class _Moment:
    """What going back restores."""

    snapshot: Snapshot
    view: View
    idle: np.ndarray
    plan: State


class Steering:
    """One rollout that a user steers by ``press``; not for several threads at once."""

    def __init__(
        self, env: world_models.ImaginedEnv, episodes: int, idle: np.ndarray, policy: Policy | None = None
    ) -> None:
        """``env``: one environment, its seeds below ``episodes`` are initial states; ``idle``: :func:`idle_action`."""
        self.env, self.policy, self.keys = env, policy, keys_of(env.spec.action)
        self._episodes, self._open = episodes, idle
        self._actions = {name: key for key in self.keys for name in key.keys}
        self.view = self._begin(0)

    def press(self, key: str) -> View:
        """The view after ``key``; an action key makes one control step, "p" one decision of the policy.

        Raises UserError for a key that means nothing here; then nothing has happened.
        """
        name = key.lower()
        other = {"r": self._next, "b": self._back, "p": self._decide}
        if name in other:
            self.view = other[name]()
            return self.view
        known = self._actions.get(name.removeprefix("shift+"))
        if known is None:
            raise UserError(f"the key {key!r} means nothing here; {did_you_mean(name, {*other, *self._actions})}")
        self.view = self._act(known, FINE if name.startswith("shift+") else 1.0)
        return self.view

    # -- what keys do ------------------------------------------------------------------------------------------------

    def _begin(self, episode: int) -> View:
        obs = self.env.reset(np.zeros(1, int), np.array([episode % self._episodes]))
        self._obs, self._idle, self._past = obs, self._open.copy(), list[_Moment]()
        self._plan: State = {}
        if self.policy is not None:
            self._plan = self.policy.reset_state(self.policy.initial_state(1), np.zeros(1, int))
        text = self.env.spec.tasks[int(obs.task[0])]
        view = View(_picture(obs)[None], text, episode % self._episodes, 0, self.env.spec.time_limit)
        return replace(view, grip=self._grip())

    def _next(self) -> View:
        return self._begin(self.view.episode + 1)

    def _back(self) -> View:
        if not self._past:
            return self._said("There is nothing to take back: this is where the rollout began.")
        moment = self._past.pop()
        self._obs = self.env.restore(np.zeros(1, int), moment.snapshot)
        self._idle, self._plan = moment.idle, moment.plan
        return replace(moment.view, pictures=moment.view.pictures[-1:], remark="")

    def _decide(self) -> View:
        if self.policy is None:
            return self._said("There is no policy in this run, so nobody else can act.")
        if self.view.cause:
            return self._over()
        # A function of the moment alone, so that a decision that was taken back is repeated.
        seed = 1_000_003 * (1 + self.view.episode) + self.view.step
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            features, plan = encode_observation(self.policy, self._obs, self._plan, generator)
            out, plan = self.policy.act(features, plan, "eval", generator)
        chunk = np.asarray(out.action, np.float32)[:, : self.env.spec.max_chunk]
        # The next key does not open a gripper that the policy has closed.
        return self._step(chunk, plan, _gripping(self._idle, self.env.spec.action, chunk[0, -1]))

    def _act(self, key: Key, share: float) -> View:
        if key.entry is None:
            return self._said(f"That key does {key.does}.")
        if self.view.cause:
            return self._over()
        low, high = _bounds(self.env.spec.action)
        idle, action = self._idle.copy(), self._idle.copy()
        if key.sign:
            bound = (high if key.sign > 0 else low)[key.entry]
            action[key.entry] += share * (bound - action[key.entry])
        else:
            idle[key.entry] = low[key.entry] + high[key.entry] - idle[key.entry]
            action = idle
        return self._step(action[None, None], self._plan, idle)

    def _step(self, chunk: np.ndarray, plan: State, idle: np.ndarray) -> View:
        """Predict through ``chunk`` [1,H,D]; afterwards ``plan`` is the policy's state and ``idle`` the idle action."""
        self._past.append(_Moment(self.env.snapshot(np.zeros(1, int)), self.view, self._idle, self._plan))
        step = self.env.step(chunk, observe="all")
        self._obs, self._plan, self._idle = step.obs, plan, idle
        done, _, success_probability = (float(item) for item in self.env.outcome[0])
        time, uncertainty, cause = int(step.obs.time[0]), float(self.env.uncertainty[0]), str(step.cause[0])
        limit = self._limit(time)
        exceeded = limit is not None and uncertainty > limit
        return replace(
            self.view,
            pictures=np.stack([_picture(frame) for frame in step.frames[: int(np.sum(step.valid))]]),
            step=time,
            done=done,
            success_probability=success_probability,
            uncertainty=uncertainty,
            limit=limit,
            cause=cause,
            end=_FLIPPED if cause == "uncertainty" and not exceeded else _ENDS.get(cause, cause),
            remark="",
            grip=self._grip(),
        )

    # -- the view -----------------------------------------------------------------------------------------------------

    def _limit(self, time: int) -> float | None:
        """The limit of uncertainty of the call that step ``time``, from 1, belongs to; None where there is none."""
        if self.env.limits is None:
            return None
        limit = float(self.env.limits.at(np.array([(time - 1) // self.env.model.config.frames]))[0])
        return limit if np.isfinite(limit) else None

    def _grip(self) -> float | None:
        entry = self.keys[-1].entry
        return None if entry is None else float(self._idle[entry])

    def _said(self, remark: str) -> View:
        """The same view with a remark."""
        return replace(self.view, pictures=self.view.pictures[-1:], remark=remark)

    def _over(self) -> View:
        return self._said("This rollout has ended: R begins the next one, B takes the last step back.")


def _bounds(action: ArraySpec) -> tuple[np.ndarray, np.ndarray]:
    shape = action.shape
    return tuple(np.broadcast_to(np.asarray(b, np.float32), shape).copy() for b in (action.low, action.high))  # type: ignore[return-value]


def _gripping(idle: np.ndarray, action: ArraySpec, like: np.ndarray) -> np.ndarray:
    """``idle`` [D] with the gripper at the bound that it is nearer to in the action ``like`` [D]."""
    entry = _entry(action, "grip")
    if entry is None:
        return idle
    low, high = _bounds(action)
    held = idle.copy()
    held[entry] = low[entry] if like[entry] - low[entry] <= high[entry] - like[entry] else high[entry]
    return held


def _entry(action: ArraySpec, axis: str) -> int | None:
    for i, name in enumerate(action.names):
        plain = name.lower()
        if axis == "grip" and plain.startswith("grip"):
            return i
        if plain == axis or any(plain == prefix + axis for prefix in _PREFIXES):
            return i
    return None


def _picture(obs: Observation) -> np.ndarray:
    """uint8 [h,w,3] of the only row."""
    return mosaic({name: np.asarray(image)[0] for name, image in obs.images.items()}, 1)


# -- the page ---------------------------------------------------------------------------------------------------------

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

    GET /view is the present view, POST /press {"key": ...} answers with the view after that key.
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
