"""Replays recorded decisions through a policy's loading and normalisation, and finds the first number that differs.

Stages in the order of the data: the observation against what the policy was trained on, the features (what the network
is given), the normalised sample, the action in physical units.  What follows a difference differs too, so the first one
is the one to look at.  A second replay, of the executed actions in an environment, compares its observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_rl.contract.check import check_array
from vla_rl.contract.env import EnvSpec, Observation, VecEnv, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.evaluation.trace import FEATURES, OBSERVATION, Trace
from vla_rl.experience.collect import features_of

_PIXEL_TOLERANCE = 8.0  # mean absolute difference of pictures, of 255: renderers round differently

Values = tuple[str, np.ndarray, np.ndarray]  # name, ours, theirs


@dataclass
class Compared:
    """One key over the whole trace: ``largest`` difference, and the ``first`` decision where it exceeds the tolerance.

    ``reason`` says what is wrong with the data themselves, such as a shape, or what explains the difference.
    """

    key: str
    steps: int = 0
    largest: float = 0.0
    first: int | None = None
    reason: str = ""
    ours: list[np.ndarray] = field(default_factory=list)
    theirs: list[np.ndarray] = field(default_factory=list)

    def add(self, step: int, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
        """Compare one decision; of chunks of different lengths the common part."""
        ours, theirs = _common(self.key, ours, theirs)
        self.steps += 1
        if ours.shape != theirs.shape:
            self.fail(step, f"theirs has the shape {list(theirs.shape)}, ours {list(ours.shape)}")
            return
        difference, limit = _difference(ours, theirs, tolerance)
        self.largest = max(self.largest, difference)
        self.ours.append(ours)
        self.theirs.append(theirs)
        if difference > limit and self.first is None:
            self.first = step

    def fail(self, step: int, reason: str) -> None:
        """The data of ``step`` cannot be compared or used."""
        self.largest = np.inf
        if self.first is None:
            self.first, self.reason = step, reason

    def explained(self) -> Compared:
        """With a ``reason``, if the two are a simple transformation of each other over all steps."""
        if self.first is not None and not self.reason and self.ours:
            self.reason = explain(np.stack(self.ours), np.stack(self.theirs))
        return self


def replay_policy(
    policy: Policy,
    spec: EnvSpec,
    trace: Trace,
    generator: Callable[[int], Any],
    tolerance: float,
    noise_is_known: bool = True,
) -> list[Compared]:
    """Every key of ``trace`` that ``policy`` computes as well, in the order of the data.

    ``spec`` is what the policy was trained on, ``generator(step)`` the noise of a decision.  Unless ``noise_is_known``
    samples and actions are not compared.
    """
    found: dict[str, Compared] = {}
    state = policy.reset_state(policy.initial_state(1), np.arange(1))
    for step in range(len(trace)):
        obs = trace.observation(step, spec.tasks)
        if not _usable(obs, spec, step, found):
            break
        noise = generator(step)
        features, state = encode_observation(policy, obs, state, noise)
        for name, ours, theirs in _features(features, trace, step):
            found.setdefault(name, Compared(name)).add(step, ours, theirs, tolerance)
        out, state = policy.act(features, state, "eval", noise)
        for name, array in (("sample", out.sample), ("action", out.action)):
            if noise_is_known and name in trace.arrays:
                theirs = trace.arrays[name][step]
                found.setdefault(name, Compared(name)).add(step, on_host(array)[0], theirs, tolerance)
    return [one.explained() for one in found.values()]


def replay_env(env: VecEnv, trace: Trace, tolerance: float) -> list[Compared]:
    """Observations of ``env`` (one environment) from the trace's seed under its executed actions, key by key.

    Raises ContractError when the trace lacks ``seed``, or ``executed`` and ``action``.
    """
    chunks = trace.arrays.get("executed", trace.arrays.get("action"))
    if "seed" not in trace.scalars or chunks is None:
        raise ContractError(
            f"the trace {trace.name!r} has no seed or no executed actions, so it cannot be replayed in an environment; "
            "record 'seed' and 'executed', or leave --env out."
        )
    found: dict[str, Compared] = {}
    obs = env.reset(np.arange(1), np.array([trace.scalars["seed"]]))
    for step in range(len(trace)):
        ours = {OBSERVATION + name: on_host(item)[0] for name, item in features_of(obs.public()).items()}
        for name in [name for name in ours if name in trace.arrays]:
            found.setdefault(name, Compared(name)).add(step, ours[name], trace.arrays[name][step], tolerance)
        chunk = chunks[step][np.isfinite(chunks[step]).all(-1)]
        obs = env.step(chunk[None].astype(np.float32)).obs
    return [one.explained() for one in found.values()]


def first_difference(compared: list[Compared]) -> Compared | None:
    """The key that differs first in time, and among those of one decision first in the order of the data."""
    differing = [one for one in compared if one.first is not None]
    return min(differing, key=lambda one: one.first or 0, default=None)


def _usable(obs: Observation, spec: EnvSpec, step: int, found: dict[str, Compared]) -> bool:
    """Whether the policy can read the observation; notes the first array that it cannot."""
    arrays: Mapping[str, Any] = {f"images/{name}": obs.images.get(name) for name in spec.images} | {"state": obs.state}
    for name, array in arrays.items():
        declared = spec.images[name.removeprefix("images/")] if name != "state" else spec.state
        one = found.setdefault(OBSERVATION + name, Compared(OBSERVATION + name))
        one.steps += 1
        try:
            if array is None:
                one.fail(step, f"the trace has no such camera but {sorted(obs.images) or 'none'}")
                return False
            check_array(name, array, declared, (1,))
        except ContractError as error:
            one.fail(step, str(error))
            if array.shape[1:] != declared.shape or str(array.dtype) != declared.dtype:
                return False
    return True


def _features(features: Mapping[str, Any], trace: Trace, step: int) -> Iterator[Values]:
    for name, item in features.items():
        if FEATURES + name in trace.arrays:
            yield FEATURES + name, on_host(item)[0], trace.arrays[FEATURES + name][step]


def _common(key: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if key in ("sample", "action"):
        shared = min(len(ours), len(theirs))
        return ours[:shared], theirs[:shared]
    return ours, theirs


def _difference(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> tuple[float, float]:
    """How different they are, and how different they may be; a NaN equals a NaN and nothing else."""
    if ours.dtype == np.uint8:
        return float(np.abs(ours.astype(float) - theirs).mean()), _PIXEL_TOLERANCE
    a, b = ours.astype(float), theirs.astype(float)
    same, finite = (a == b) | (np.isnan(a) & np.isnan(b)), np.isfinite(a) & np.isfinite(b)
    gap = np.where(same, 0.0, np.inf)
    np.subtract(a, b, out=gap, where=finite)
    largest = np.abs(a, where=np.isfinite(a), out=np.zeros_like(a)).max(initial=0.0)
    return float(np.abs(gap).max(initial=0.0)), tolerance * max(1.0, float(largest))


_PICTURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "theirs is upside down": lambda image: image[:, ::-1],
    "theirs is mirrored": lambda image: image[:, :, ::-1],
    "theirs is rotated by 180 degrees": lambda image: image[:, ::-1, ::-1],
    "theirs is BGR": lambda image: image[..., ::-1],
}
_CLOSE = 0.1  # of the unexplained difference may remain
_FIT = 1e-3  # residual of a fit, of the spread of the entry


def explain(ours: np.ndarray, theirs: np.ndarray) -> str:
    """A sentence for ``theirs`` as a transformation of ``ours``, both [T,...] and of one shape; "" for none."""
    for side, name in ((ours, "ours"), (theirs, "theirs")):
        if not np.isfinite(side).all():
            return f"{name} has numbers that are not finite"
    if ours.ndim == 4 and ours.shape[-1] == 3:
        return _pictures(ours.astype(float), theirs.astype(float))
    size = ours.shape[-1] if ours.ndim > 1 else 1
    return _vectors(ours.reshape(-1, size).astype(float), theirs.reshape(-1, size).astype(float))


def _pictures(ours: np.ndarray, theirs: np.ndarray) -> str:
    before = np.abs(ours - theirs).mean()
    for what, change in _PICTURES.items():
        if np.abs(change(ours) - theirs).mean() < _CLOSE * before:
            return what
    return ""


def _vectors(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The entries that are another entry, or a linear function, of ours."""
    order = _order(ours, theirs)
    if order is not None:
        return f"theirs has our entries in the order {order}"
    found = [_linear(ours[:, i], theirs[:, i]) for i in range(ours.shape[1])]
    said = [f"entry {i} of theirs is {text}" for i, text in enumerate(found) if text]
    return ", ".join(said)


def _order(ours: np.ndarray, theirs: np.ndarray) -> list[int] | None:
    """Which of our entries each of theirs is, if each is exactly one and not all are in place."""
    spread = np.abs(ours).max(0) + 1e-9
    same = [
        [bool((np.abs(theirs[:, j] - ours[:, i]) <= _FIT * spread[i]).all()) for i in range(ours.shape[1])]
        for j in range(ours.shape[1])
    ]
    order = [row.index(True) if sum(row) == 1 else -1 for row in same]
    return order if sorted(order) == list(range(len(order))) and order != sorted(order) else None


def _linear(ours: np.ndarray, theirs: np.ndarray) -> str:
    """``ours * a + b`` where that is what ``theirs`` is; "" where they are equal or unrelated."""
    spread = float(ours.std())
    if np.abs(ours - theirs).max() <= _FIT * max(spread, 1e-6):
        return ""
    if len(ours) < 3 or spread < 1e-9:
        return ""
    factor, offset = np.polyfit(ours, theirs, 1)
    scale = max(abs(factor) * spread, 1e-9)
    if np.abs(factor * ours + offset - theirs).max() > 10 * _FIT * scale:
        return ""
    shift = f" {offset:+.4g}" if abs(offset) > _FIT * scale else ""
    return f"ours * {factor:.4g}{shift}"
