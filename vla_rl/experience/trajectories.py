"""Trajectories: whole episodes of any outcome with every frame, the training data of world models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import read_arrays
from vla_rl.experience.demonstrations import Demonstrations


@dataclass(frozen=True)
class Trajectories:
    """``M`` time steps of whole episodes, in order; an episode of ``T`` actions has ``T + 1`` of them.

    images   {camera: uint8 [M,h,w,c]}
    state    float32 [M,S]
    action   float32 [M,D]   action executed at this time step; 0 at an episode's last
    task     int64 [M]       index into the environment's texts
    success  bool [M]        whether the episode has succeeded by this time step
    failed   bool [M]        whether the episode has ended in failure by this time step
    episode  int64 [M]       0, 1, ...
    seed     int64 [M]       of the episode, -1 when unknown
    reward   float32 [M]     of the action; 0 at an episode's last time step, NaN in episodes that have none recorded
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    task: np.ndarray
    success: np.ndarray
    failed: np.ndarray
    episode: np.ndarray
    seed: np.ndarray
    reward: np.ndarray

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(self.spans())

    @property
    def steps(self) -> int:
        """Actions in all episodes."""
        return len(self.state) - self.count

    @property
    def outcomes(self) -> np.ndarray:
        """bool [count]: which episodes succeeded."""
        outcomes: np.ndarray = self.success[self.ends - 1]
        return outcomes

    @property
    def ends(self) -> np.ndarray:
        """int64 [count]: one after the last time step of every episode."""
        return np.append(np.flatnonzero(np.diff(self.episode)) + 1, len(self.episode))

    def spans(self) -> list[tuple[int, int]]:
        """First time step and one after the last of every episode."""
        begins = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.episode)], strict=True))

    def recorded_rewards(self) -> np.ndarray:
        """float32 [steps]: the reward of every action; raises UserError where an episode has none recorded."""
        actions = np.ones(len(self.state), bool)
        actions[self.ends - 1] = False
        rewards: np.ndarray = self.reward[actions]
        if (unknown := np.isnan(rewards)).any():
            missing = len(np.unique(self.episode[actions][unknown]))
            raise UserError(
                f"{missing} of {self.count} episodes have no rewards recorded, as those of earlier versions and of "
                "datasets without 'next.reward', so a world model cannot learn what they were rewarded with; collect "
                "them again in a new run, or leave the head out (plan.model.reward)."
            )
        return rewards

    def select(self, episodes: Sequence[int] | np.ndarray) -> Trajectories:
        """Those ``episodes`` alone, renumbered from 0 in the order given."""
        spans = self.spans()
        index = np.concatenate([np.arange(*spans[i]) for i in episodes]) if len(episodes) else np.zeros(0, int)
        lengths = [spans[i][1] - spans[i][0] for i in episodes]
        parts = {name: getattr(self, name)[index] for name in _NAMES}
        images = {name: image[index] for name, image in self.images.items()}
        return Trajectories(images, **parts | {"episode": np.repeat(np.arange(len(lengths)), lengths)})

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """``parts`` concatenated; raises ContractError when their cameras differ."""
        for part in parts:
            if part.images.keys() != parts[0].images.keys():
                raise ContractError(
                    f"trajectories with the cameras {sorted(part.images)} cannot be joined to some with "
                    f"{sorted(parts[0].images)}; record the same ones."
                )
        lengths = [end - begin for part in parts for begin, end in part.spans()]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES}
        images = {name: np.concatenate([part.images[name] for part in parts]) for name in parts[0].images}
        return cls(images, **arrays | {"episode": np.repeat(np.arange(len(lengths)), lengths)})

    def save(self, path: Path) -> None:
        """Write every pixel and number to one ``.npz``; :meth:`load` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        images = {f"images/{name}": image for name, image in self.images.items()}
        unfinished = path.with_suffix(".part.npz")
        arrays = images | {name: getattr(self, name) for name in _NAMES}
        np.savez_compressed(unfinished, allow_pickle=False, **arrays)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Trajectories:
        """Read a file of :meth:`save`; raises UserError for a missing, damaged or other file.

        Rewards of files that were written before they were recorded are NaN.
        """
        try:
            file = read_arrays(path)
            images = {name.removeprefix("images/"): file[name] for name in file if name.startswith("images/")}
            arrays = {name: file[name] for name in _NAMES if name in file or name != "reward"}
            return cls(images, **{"reward": _unknown(arrays["state"]), **arrays})
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"no episodes could be read from {str(path)!r} ({error}), so there is nothing to learn from; record "
                "them again."
            ) from error

    @classmethod
    def from_demonstrations(cls, episodes: Demonstrations) -> Trajectories:
        """From recorded episodes, for instance of a LeRobot folder.

        They lack the picture after the last action.  Their last picture stands for it and the last action is left out,
        so an outcome appears one control step early, and the last reward beside the one before it.  Raises UserError
        when success was not recorded.
        """
        if "next.success" not in episodes.extras:
            raise UserError(
                "the episodes have no 'next.success', so nothing could be learnt about outcomes; record them with "
                "'vla-rl collect', or add the column."
            )
        last = np.array([end - 1 for _, end in episodes.spans()])
        success, failed = np.zeros(len(episodes.state), bool), np.zeros(len(episodes.state), bool)
        success[last] = np.asarray(episodes.extras["next.success"]).reshape(-1)[last]
        terminated = np.asarray(episodes.extras.get("next.terminated", np.zeros(len(success), bool))).reshape(-1)
        failed[last] = terminated[last] & ~success[last]
        action = episodes.action.copy()
        action[last] = 0
        reward = np.array(episodes.extras.get("next.reward", _unknown(action)), np.float32).reshape(-1)
        reward[last - 1] += reward[last]
        reward[last] = 0.0  # also what an episode of one action added to its neighbour's end
        names = ("state", "task", "episode", "seed")
        kept = {name: getattr(episodes, name) for name in names}
        return cls(episodes.images, action=action, success=success, failed=failed, reward=reward, **kept)


_NAMES = ("state", "action", "task", "success", "failed", "episode", "seed", "reward")


def _unknown(like: np.ndarray) -> np.ndarray:
    """Rewards [M] that nobody recorded, one for each row of ``like``."""
    return np.full(len(like), np.nan, np.float32)
