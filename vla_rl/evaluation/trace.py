"""Recorded decisions of an evaluator, ours or anybody's: one ``.npz`` file per episode, written by ``numpy.savez``.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, on_host
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.trust import check_folder, read_arrays
from vla_rl.experience.collect import features_of
from vla_rl.experience.driver import Decision

OBSERVATION, FEATURES, INSTRUCTION = "observation/", "features/", "instruction"
_SCALARS = ("seed", "noise_seed")


@dataclass(frozen=True)
class Trace:
    """One episode: ``arrays`` by the names above, each [T,...]; ``scalars`` are ``seed`` and ``noise_seed``."""

    name: str
    arrays: Mapping[str, np.ndarray]
    scalars: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """``T``: decisions."""
        return len(self.arrays[f"{OBSERVATION}state"])

    def observation(self, step: int, tasks: tuple[str, ...]) -> Observation:
        """The observation of decision ``step`` as one environment's; raises UserError for a text not in ``tasks``."""
        text = str(self.arrays[INSTRUCTION][step]) if INSTRUCTION in self.arrays else tasks[0]
        if text not in tasks:
            raise UserError(
                f"the trace {self.name!r} has the instruction {text!r}, which the policy does not know; "
                f"{did_you_mean(text, tasks)}"
            )
        row = {name: array[step : step + 1] for name, array in self.arrays.items()}
        images, extras = (
            {name.removeprefix(kind): item for name, item in row.items() if name.startswith(kind)}
            for kind in (f"{OBSERVATION}images/", f"{OBSERVATION}extras/")
        )
        time = row.get(f"{OBSERVATION}time", np.array([step]))
        return Observation(images, row[f"{OBSERVATION}state"], np.array([tasks.index(text)]), time, extras)


def read_traces(path: Path) -> list[Trace]:
    """The trace in a file, or those in a folder in the order of their names; raises UserError when there is none."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path.resolve()]
    if not files:
        raise UserError(
            f"{str(path)!r} has no .npz file, so there is no trace; write one as vla_rl/evaluation/trace.py says."
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
            "arrays as vla_rl/evaluation/trace.py says."
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
        arrays: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        arrays |= {"seed": np.array(seed), "noise_seed": np.array(self.noise_seed)}
        writing = self.folder / f"episode-{seed}.npz.writing"
        with writing.open("wb") as file:
            np.savez_compressed(file, **arrays)
        writing.replace(self.folder / f"episode-{seed}.npz")


def _arrays(decision: Decision, tasks: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of one decision, [E,...]."""
    public = features_of(decision.obs.public())
    found = {OBSERVATION + name: on_host(item) for name, item in public.items() if name != "task"}
    found[INSTRUCTION] = np.array([tasks[int(task)] for task in on_host(decision.obs.task)])
    found |= {FEATURES + name: on_host(item) for name, item in decision.features.items()}
    found |= {"sample": on_host(decision.out.sample), "action": on_host(decision.out.action)}
    executed = on_host(decision.step.executed).astype(np.float32)
    found["executed"] = np.where(on_host(decision.step.valid)[..., None], executed, np.float32(np.nan))
    return found
