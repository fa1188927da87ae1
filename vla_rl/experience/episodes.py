"""Recorded episodes: demonstrations as arrays, one entry per control step."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import UserError

_NAMES = ("state", "task", "time", "action", "episode", "seed")


@dataclass(frozen=True)
class Episodes:
    """``N`` control steps of successful episodes, in order.

    images {camera: uint8 [N,h,w,c]}, state float32 [N,S], task int64 [N], time int64 [N], action float32 [N,D] (what
    was executed), episode int64 [N], seed int64 [N]
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    task: np.ndarray
    time: np.ndarray
    action: np.ndarray
    episode: np.ndarray
    seed: np.ndarray

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(np.unique(self.episode))

    def observation(self) -> Observation:
        """All steps as one batch of observations."""
        return Observation(self.images, self.state, self.task, self.time)

    def chunks(self, horizon: int) -> np.ndarray:
        """The ``horizon`` actions that follow each step [N,H,D]; an episode's last action is repeated past its end."""
        last = np.searchsorted(self.episode, self.episode, side="right") - 1
        index = np.minimum(np.arange(len(self.episode))[:, None] + np.arange(horizon), last[:, None])
        return np.asarray(self.action[index])

    def save(self, path: Path) -> None:
        """Write one compressed ``.npz`` atomically."""
        arrays = {f"images/{name}": image for name, image in self.images.items()}
        arrays |= {name: getattr(self, name) for name in _NAMES}
        writing = path.with_name(path.name + ".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            os.replace(writing, path)
        except OSError as error:
            with suppress(OSError):
                writing.unlink()
            raise UserError(
                f"the episodes could not be written to {str(path)!r} ({error}), so nothing there has changed; free "
                "some disk space or choose another folder."
            ) from error

    @classmethod
    def load(cls, path: Path) -> Episodes:
        """Read what :meth:`save` wrote; raises UserError when the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                images = {name[len("images/") :]: file[name] for name in file.files if name.startswith("images/")}
                return cls(images, **{name: file[name] for name in _NAMES})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(
                f"{str(path)!r} holds no readable episodes ({error}), so nothing can be imitated; record them again "
                "with 'vla-rl collect'."
            ) from error


def record(
    env: VecEnv,
    expert: Callable[[Observation], np.ndarray],
    seeds: list[int],
    report: Callable[[int], None] = lambda done: None,
) -> Episodes:
    """Let ``expert(obs) -> [E,1,D]`` play one episode per seed, one control step at a time, and keep the successes."""
    kept: list[tuple[int, list[Observation], list[np.ndarray]]] = []
    for start in range(0, len(seeds), env.num_envs):
        batch = seeds[start : start + env.num_envs]
        kept += _play(env, expert, batch)
        report(start + len(batch))
    if not kept:
        raise UserError(
            f"none of {len(seeds)} demonstrations of {env.spec.name!r} succeeded, so there is nothing to imitate; look "
            "at the expert."
        )
    frames = [obs for _, observations, _ in kept for obs in observations]
    lengths = [len(actions) for _, _, actions in kept]
    return Episodes(
        {name: np.concatenate([obs.images[name] for obs in frames]) for name in env.spec.images},
        np.concatenate([obs.state for obs in frames]),
        np.concatenate([obs.task for obs in frames]),
        np.concatenate([obs.time for obs in frames]),
        np.stack([action for _, _, actions in kept for action in actions]),
        np.repeat(np.arange(len(kept)), lengths),
        np.repeat([seed for seed, _, _ in kept], lengths),
    )


def _play(
    env: VecEnv, expert: Callable[[Observation], np.ndarray], seeds: list[int]
) -> list[tuple[int, list[Observation], list[np.ndarray]]]:
    """One batch of episodes; rows beyond ``seeds`` replay the last seed and are not kept."""
    padded = seeds + [seeds[-1]] * (env.num_envs - len(seeds))
    obs = env.reset(np.arange(env.num_envs), np.array(padded))
    tracks: list[tuple[int, list[Observation], list[np.ndarray]]] = [(seed, [], []) for seed in seeds]
    while True:
        step = env.step(expert(obs)[:, :1])
        for row, (_, observations, actions) in enumerate(tracks):
            if step.valid[row, 0]:
                observations.append(obs.rows(slice(row, row + 1)))
                actions.append(np.array(step.executed[row, 0]))
        obs = step.obs
        if step.done.all():
            return [track for row, track in enumerate(tracks) if step.success[row]]
