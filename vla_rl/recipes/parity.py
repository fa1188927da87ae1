"""Another evaluator's decisions, replayed through a checkpoint's loading and normalisation: what differs first?

Stages in the order of the data: the observation against what the policy was trained on, the features (what the network
is given), the normalised sample, the action in physical units.  What follows a difference differs too, so the first one
is the one to look at.  A second replay, of the executed actions in an environment, compares its observations.

Recorded decisions of an evaluator, ours or anybody's: one ``.npz`` file per episode, written by ``numpy.savez``.

Every array has the leading axis [T] of decisions, unless it says otherwise; all but the observation are optional.

observation/images/CAMERA  uint8 [T,h,w,3]  as the simulator gave it to the policy's code
observation/state          float32 [T,S]    proprioception in physical units
observation/extras/NAME    [T,...]
observation/time           int [T]          low-level actions since the reset; 0, 1, 2, ... without
instruction                str [T] or []    the text; the first of the policy's instructions without
features/NAME              [T,...]          what the network was given after normalisation, by our names
noise                      [T,...]          the noise that the sample was made from, for flows and diffusion
sample                     [T,H,D]          the normalised actions that the network chose
action                     [T,H,D]          the same in physical units
executed                   [T,H,D]          the actions that were executed, NaN after the end of the episode
seed, noise_seed           int []           of our own traces: the episode and its noise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.contract.check import check_array
from vla_rl.contract.env import EnvSpec, Observation, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.contract.trust import check_folder, read_arrays, write_arrays
from vla_rl.evaluation.run import episode_generator
from vla_rl.experience.driver import Decision
from vla_rl.policies.noise import RecordedNoise
from vla_rl.policies.pretrained import load_policy, read_config

OBSERVATION, FEATURES, INSTRUCTION = "observation/", "features/", "instruction"
CHOSEN = ("sample", "action")
_PIXEL_TOLERANCE = 8.0  # mean absolute difference of pictures, of 255: renderers round differently


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
        self.steps += 1
        if self.key in CHOSEN:
            shared = min(len(ours), len(theirs))
            ours, theirs = ours[:shared], theirs[:shared]
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


def replay_checkpoint(folder: Path, trace: Trace, tolerance: float) -> list[Compared]:
    """Every key of ``trace`` that the policy in ``folder`` computes as well, in the order of the data.

    Samples and actions are compared where the policy draws no noise or its noise is known.  Raises UserError for
    instructions that it does not know.
    """
    policy: Policy = load_policy(folder)
    spec = EnvSpec.from_json(read_config(folder)["spec"])
    noise = _noise_of(trace)
    chosen = () if noise is None and _draws_noise(policy, spec, trace) else CHOSEN
    found: dict[str, Compared] = {}

    def compare(name: str, ours: Any) -> None:
        if name in trace.arrays:
            found.setdefault(name, Compared(name)).add(step, on_host(ours)[0], trace.arrays[name][step], tolerance)

    state = policy.reset_state(policy.initial_state(1), np.arange(1))
    for step in range(len(trace)):
        obs = trace.observation(step, spec.tasks)
        if not _usable(obs, spec, step, found):
            break
        generators = noise(step) if noise else [torch.Generator()]
        features, state = encode_observation(policy, obs, state, generators)
        for name, item in features.items():
            compare(FEATURES + name, item)
        out, state = policy.act(features, state, "eval", generators)
        for name in chosen:
            compare(name, getattr(out, name))
    return [one.explained() for one in found.values()]


def _noise_of(trace: Trace) -> Callable[[int], list[Any]] | None:
    """The generators of the trace's decisions: its recorded noise, or that of its seeds; None when it has neither."""
    if "noise" in trace.arrays:
        return lambda step: [RecordedNoise(torch.from_numpy(np.array(trace.arrays["noise"][step])))]
    if {"seed", "noise_seed"} <= trace.scalars.keys():
        generator = episode_generator(trace.scalars["noise_seed"], trace.scalars["seed"])
        return lambda step: [generator]
    return None


def _draws_noise(policy: Policy, spec: EnvSpec, trace: Trace) -> bool:
    """Whether the policy's first action depends on the generator."""
    samples = []
    for seed in (0, 1):
        noise = [torch.Generator().manual_seed(seed)]
        state = policy.reset_state(policy.initial_state(1), np.arange(1))
        features, state = encode_observation(policy, trace.observation(0, spec.tasks), state, noise)
        samples.append(on_host(policy.act(features, state, "eval", noise)[0].sample))
    return not np.array_equal(samples[0], samples[1])


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
        ours = {OBSERVATION + name: on_host(item)[0] for name, item in obs.public().arrays().items()}
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


_SCALARS = ("seed", "noise_seed")


@dataclass(frozen=True)
class Trace:
    """One episode: ``arrays`` by the names above, each [T,...]; ``scalars`` are ``seed`` and ``noise_seed``."""

    name: str
    arrays: Mapping[str, np.ndarray]
    scalars: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrays[f"{OBSERVATION}state"])

    def observation(self, step: int, tasks: tuple[str, ...]) -> Observation:
        """The observation of decision ``step`` as one environment's; raises UserError for a text not in ``tasks``."""
        text = str(self.arrays[INSTRUCTION][step]) if INSTRUCTION in self.arrays else tasks[0]
        if text not in tasks:
            raise UserError(
                f"the trace {self.name!r} has the instruction {text!r}, which the policy does not know; "
                f"{did_you_mean(text, tasks)}"
            )
        recorded = {name.removeprefix(OBSERVATION): array[step : step + 1] for name, array in self.arrays.items()}
        return Observation.of_arrays({"time": np.array([step]), **recorded, "task": np.array([tasks.index(text)])})


def read_traces(path: Path) -> list[Trace]:
    """The trace in a file, or those in a folder in the order of their names; raises UserError when there is none."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path.resolve()]
    if not files:
        raise UserError(
            f"{str(path)!r} has no .npz file, so there is no trace; write one as vla_rl/recipes/parity.py says."
        )
    return [_read(file) for file in files]


def _read(file: Path) -> Trace:
    try:
        found = read_arrays(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(file)!r} cannot be read ({error}), so nothing can be replayed; write it by numpy.savez with plain "
            "arrays, not objects."
        ) from error
    scalars = {name: int(found.pop(name)) for name in _SCALARS if name in found}
    if f"{OBSERVATION}state" not in found:
        raise UserError(
            f"{str(file)!r} has no '{OBSERVATION}state' but {sorted(found)}, so nothing can be replayed; name its "
            "arrays as vla_rl/recipes/parity.py says."
        )
    length = len(found[f"{OBSERVATION}state"])
    found = {name: np.broadcast_to(item, (length,)) if item.ndim == 0 else item for name, item in found.items()}
    for name, item in found.items():
        if len(item) != length:
            raise UserError(
                f"{name!r} of {str(file)!r} has {len(item)} decisions and the state {length}, so they cannot be "
                "matched; record one row per decision."
            )
    return Trace(file.name, found, scalars)


class TraceRecorder:
    """Writes a trace of every episode that is played, ``episode-SEED.npz`` in ``folder``."""

    def __init__(self, folder: Path, tasks: tuple[str, ...], noise_seed: int) -> None:
        self.folder, self.tasks, self.noise_seed = folder, tasks, noise_seed
        self._running: dict[int, list[dict[str, np.ndarray]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)

    def watch(self, decision: Decision) -> None:
        """Keep a decision of every running environment; an episode that has ended is written."""
        arrays = _arrays(decision, self.tasks)
        running, done = on_host(decision.step.valid).any(1), on_host(decision.step.done)
        start = on_host(decision.obs.time) == 0
        for env_id in np.flatnonzero(running).tolist():
            rows = self._running.setdefault(env_id, [])
            if start[env_id]:
                rows.clear()
            rows.append({name: array[env_id] for name, array in arrays.items()})
            if done[env_id]:
                self._write(rows, int(decision.seeds[env_id]))

    def _write(self, rows: list[dict[str, np.ndarray]], seed: int) -> None:
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays |= {"seed": np.array(seed), "noise_seed": np.array(self.noise_seed)}
        write_arrays(self.folder / f"episode-{seed}.npz", arrays)


def _arrays(decision: Decision, tasks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of one decision, [E,...]."""
    public = decision.obs.public().arrays()
    found = {OBSERVATION + name: on_host(item) for name, item in public.items() if name != "task"}
    found[INSTRUCTION] = np.array([tasks[int(task)] for task in on_host(decision.obs.task)])
    found |= {FEATURES + name: on_host(item) for name, item in decision.features.items()}
    found |= {"sample": on_host(decision.out.sample), "action": on_host(decision.out.action)}
    executed = on_host(decision.step.executed).astype(np.float32)
    found["executed"] = np.where(on_host(decision.step.valid)[..., None], executed, np.float32(np.nan))
    return found
