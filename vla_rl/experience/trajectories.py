"""Whole episodes with every picture, the last one included, good or bad: what a world model learns from."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, VecEnv, to_env
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Mode, Policy, encode_observation
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
    def of_episodes(cls, episodes: Demonstrations) -> Trajectories:
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


def trace(
    env: VecEnv,
    policy: Policy,
    seeds: Sequence[int],
    generator: Any,
    mode: Mode = "sample",
    report: Callable[[int, int], None] = lambda episodes, successes: None,
) -> Trajectories:
    """Let ``policy`` play ``seeds`` once each and keep everything; ``report(episodes, successes)`` after each batch.

    A failure is an end by the task without success; running out of time is none.
    """
    parts: list[Trajectories] = []
    won = 0
    for start in range(0, len(seeds), env.num_envs):
        batch = list(seeds[start : start + env.num_envs])
        tracks = _play(env, policy, batch, generator, mode)
        parts += tracks
        won += sum(bool(part.success[-1]) for part in tracks)
        report(start + len(batch), won)
    return Trajectories.joined(parts)


def _play(env: VecEnv, policy: Policy, seeds: list[int], generator: Any, mode: Mode) -> list[Trajectories]:
    """One batch; rows beyond ``seeds`` replay the last seed and are not kept."""
    rows = np.arange(env.num_envs)
    obs = env.reset(rows, np.array(seeds + [seeds[-1]] * (env.num_envs - len(seeds))))
    state = policy.reset_state(policy.initial_state(env.num_envs), rows)
    tracks = [_Track(obs, row) for row in range(len(seeds))]
    while True:
        features, state = encode_observation(policy, obs, state, generator)
        out, state = policy.act(features, state, mode, generator)
        step = env.step(to_env(out.action, env), observe="all")
        for track in tracks:
            for i, frame in enumerate(step.frames):
                if step.valid[track.row, i]:
                    track.add(frame, step.executed[track.row, i])
        obs = step.obs
        if step.done.all():
            return [
                track.finished(seed, bool(step.success[track.row]), bool(step.terminated[track.row]))
                for track, seed in zip(tracks, seeds, strict=True)
            ]


class _Track:
    """One episode while it is played."""

    def __init__(self, obs: Observation, row: int) -> None:
        self.row, self.seen = row, [obs.select(slice(row, row + 1))]
        self.actions: list[np.ndarray] = []

    def add(self, obs: Observation, action: np.ndarray) -> None:
        self.seen.append(obs.select(slice(self.row, self.row + 1)))
        self.actions.append(np.array(action))

    def finished(self, seed: int, success: bool, terminated: bool) -> Trajectories:
        count = len(self.seen)
        last = np.arange(count) == count - 1
        return Trajectories(
            {name: np.concatenate([obs.images[name] for obs in self.seen]) for name in self.seen[0].images},
            state=np.concatenate([obs.state for obs in self.seen]),
            action=np.stack([*self.actions, np.zeros_like(self.actions[0])]),
            task=np.concatenate([obs.task for obs in self.seen]),
            success=last & success,
            failed=last & terminated & (not success),
            episode=np.zeros(count, np.int64),
            seed=np.full(count, seed, np.int64),
        )


def windows(trajectories: Trajectories, frames: int, memory: int) -> dict[str, np.ndarray]:
    """Every moment that something follows, with what was seen before and two calls of ``frames`` to come.

    Indices and small arrays only; :func:`cut` fetches the pictures.

    seen     int64 [N,1+memory]  moments: the episode's first, then the latest ones, ``frames`` apart, the present last
    ahead    int64 [N,2*frames]  moments to come; an episode's last is repeated past its end
    count    int64 [N]           how many of these there are
    """
    seen, ahead, count = [], [], []
    back = np.arange(memory - 1, -1, -1) * frames
    for begin, end in trajectories.spans():
        now = np.arange(begin, end - 1)
        seen.append(np.concatenate([np.full((len(now), 1), begin), np.maximum(now[:, None] - back, begin)], 1))
        ahead.append(np.minimum(now[:, None] + 1 + np.arange(2 * frames), end - 1))
        count.append(np.minimum(end - 1 - now, 2 * frames))
    return {"seen": np.concatenate(seen), "ahead": np.concatenate(ahead), "count": np.concatenate(count)}


def seen_at(trajectories: Trajectories, moments: np.ndarray, frames: int, memory: int) -> dict[str, np.ndarray]:
    """What was seen at ``moments`` [N], as ``world_models.initial_states.Start`` takes it: pictures, state, task."""
    begins = np.array([begin for begin, _ in trajectories.spans()])
    first = begins[np.searchsorted(begins, moments, side="right") - 1][:, None]
    seen = np.maximum(moments[:, None] - np.arange(memory - 1, -1, -1) * frames, first)
    return {
        "pictures": _pictures(trajectories, np.concatenate([first, seen], 1)),
        "state": trajectories.state[moments],
        "task": trajectories.task[moments],
    }


def moves(trajectories: Trajectories, table: Mapping[str, np.ndarray], index: np.ndarray) -> dict[str, np.ndarray]:
    """The first call of the windows ``index`` [B] of ``table``, with the picture that it begins with.

    pictures uint8 [B,C,h,w], state [B,1+F,S], actions [B,F,D], count [B]
    """
    frames = table["ahead"].shape[1] // 2
    moments = np.concatenate([table["seen"][index, -1:], table["ahead"][index, :frames]], 1)
    made = {"state": trajectories.state[moments], "actions": trajectories.action[moments[:, :-1]]}
    return made | {
        "pictures": _pictures(trajectories, moments[:, 0]),
        "count": np.minimum(table["count"][index], frames),
    }


def shots(trajectories: Trajectories, moments: np.ndarray) -> dict[str, np.ndarray]:
    """What is there at ``moments`` [N]: state [N,S] and pictures uint8 [N,C,h,w]."""
    return {"state": trajectories.state[moments], "pictures": _pictures(trajectories, moments)}


def cut(trajectories: Trajectories, table: Mapping[str, np.ndarray], index: np.ndarray) -> dict[str, np.ndarray]:
    """The windows ``index`` [B] of ``table``, as ``WorldModel.loss`` takes them.

    pictures uint8 [B,1+memory+2*frames,C,h,w], cameras side by side in ``C``; state [B,1+2*frames,S], actions
    [B,2*frames,D], task [B], count [B]; outcome float32 [B,2*frames,3]: done, failed, and
    whether the episode succeeded in the end
    """
    seen, ahead = table["seen"][index], table["ahead"][index]
    moments = np.concatenate([seen, ahead], 1)
    now = seen[:, -1:]
    won = trajectories.outcomes[np.searchsorted(trajectories.ends, ahead, side="right")]
    outcome = np.stack([trajectories.success[ahead], trajectories.failed[ahead], won], -1).astype(np.float32)
    return {
        "pictures": _pictures(trajectories, moments),
        "state": trajectories.state[np.concatenate([now, ahead], 1)],
        "actions": trajectories.action[np.concatenate([now, ahead[:, :-1]], 1)],
        "task": trajectories.task[now[:, 0]],
        "count": table["count"][index],
        "outcome": outcome,
    }


def _pictures(trajectories: Trajectories, moments: np.ndarray) -> np.ndarray:
    """uint8 [...,C,h,w] at ``moments`` [...], cameras in the order of their names."""
    pictures = np.concatenate([trajectories.images[name][moments] for name in sorted(trajectories.images)], -1)
    return np.moveaxis(pictures, -1, -3)
