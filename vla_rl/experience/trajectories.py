"""Whole episodes with every picture, the last one included, good or bad: what a world model learns from."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.demonstrations import Demonstrations


@dataclass(frozen=True)
class Trajectories:
    """``M`` moments of whole episodes, in order; an episode of ``T`` control steps has ``T + 1`` of them.

    images   {camera: uint8 [M,h,w,c]}
    state    float32 [M,S]
    action   float32 [M,D]   what was executed at this moment; 0 at an episode's last
    task     int64 [M]       index into the environment's texts
    success  bool [M]        the task was done by this moment
    failed   bool [M]        the episode had been ended by a failure by this moment
    episode  int64 [M]       0, 1, ...
    seed     int64 [M]       of the episode, -1 when unknown
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    task: np.ndarray
    success: np.ndarray
    failed: np.ndarray
    episode: np.ndarray
    seed: np.ndarray

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(self.spans())

    @property
    def steps(self) -> int:
        """Control steps in all episodes."""
        return len(self.state) - self.count

    @property
    def outcomes(self) -> np.ndarray:
        """bool [count]: which episodes succeeded."""
        won: np.ndarray = self.success[self.ends - 1]
        return won

    @property
    def ends(self) -> np.ndarray:
        """int64 [count]: the moment after the last, of every episode."""
        return np.append(np.flatnonzero(np.diff(self.episode)) + 1, len(self.episode))

    def spans(self) -> list[tuple[int, int]]:
        """First moment and the one after the last, of every episode."""
        begins = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.episode)], strict=True))

    def chosen(self, episodes: Sequence[int] | np.ndarray) -> Trajectories:
        """Those ``episodes`` alone, numbered from 0 in the order given."""
        spans = self.spans()
        index = np.concatenate([np.arange(*spans[i]) for i in episodes]) if len(episodes) else np.zeros(0, int)
        lengths = [spans[i][1] - spans[i][0] for i in episodes]
        parts = {name: getattr(self, name)[index] for name in _NAMES}
        images = {name: image[index] for name, image in self.images.items()}
        return Trajectories(images, **parts | {"episode": np.repeat(np.arange(len(lengths)), lengths)})

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """``parts`` one after the other; raises ContractError when their cameras differ."""
        for part in parts:
            if part.images.keys() != parts[0].images.keys():
                raise ContractError(
                    f"traces with the cameras {sorted(part.images)} cannot be joined to some with "
                    f"{sorted(parts[0].images)}; record the same ones."
                )
        lengths = [end - begin for part in parts for begin, end in part.spans()]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES}
        images = {name: np.concatenate([part.images[name] for part in parts]) for name in parts[0].images}
        return cls(images, **arrays | {"episode": np.repeat(np.arange(len(lengths)), lengths)})

    def save(self, path: Path) -> None:
        """Write everything, every pixel, as one ``.npz``; :meth:`load` brings it back."""
        path.parent.mkdir(parents=True, exist_ok=True)
        images = {f"images/{name}": image for name, image in self.images.items()}
        unfinished = path.with_suffix(".part.npz")
        arrays = images | {name: getattr(self, name) for name in _NAMES}
        np.savez_compressed(unfinished, allow_pickle=False, **arrays)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Trajectories:
        """What :meth:`save` wrote; raises UserError for a missing, damaged or foreign file."""
        try:
            with np.load(path, allow_pickle=False) as kept:
                images = {name.removeprefix("images/"): kept[name] for name in kept if name.startswith("images/")}
                return cls(images, **{name: kept[name] for name in _NAMES})
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"no episodes could be read from {str(path)!r} ({error}), so there is nothing to learn from; record "
                "them again."
            ) from error

    @classmethod
    def from_demonstrations(cls, episodes: Demonstrations) -> Trajectories:
        """From logged episodes alone, such as a LeRobot folder.

        These lack the picture after the last action, so their last picture stands for it and the action before it is
        the last that counts: an outcome is seen one control step early.  Raises UserError when they do not say which
        succeeded.
        """
        if "next.success" not in episodes.extras:
            raise UserError(
                "the episodes have no 'next.success', so nothing could be learnt about outcomes; record them with "
                "'vla-rl collect', or add the column."
            )
        last = np.array([end - 1 for _, end in episodes.spans()])
        success, failed = np.zeros(len(episodes.state), bool), np.zeros(len(episodes.state), bool)
        success[last] = np.asarray(episodes.extras["next.success"]).reshape(-1)[last]
        ended = np.asarray(episodes.extras.get("next.terminated", np.zeros(len(success), bool))).reshape(-1)
        failed[last] = ended[last] & ~success[last]
        action = episodes.action.copy()
        action[last] = 0
        names = ("state", "task", "episode", "seed")
        return cls(
            episodes.images, action=action, success=success, failed=failed, **{n: getattr(episodes, n) for n in names}
        )


_NAMES = ("state", "action", "task", "success", "failed", "episode", "seed")
