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
from vla_rl.contract.env import Observation, VecEnv, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation.parity_hints import explain
from vla_rl.evaluation.trace import FEATURES, OBSERVATION, Trace
from vla_rl.experience.expert import features_of

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
