"""Recorded episodes: demonstrations as arrays, one entry per control step, kept as LeRobotDataset v3.0 folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.spec import EnvSpec

if TYPE_CHECKING:
    from vla_rl.experience.lerobot.damage import Problem
    from vla_rl.experience.lerobot.translate import Recording


@dataclass(frozen=True)
class Demonstrations:
    """``N`` control steps of whole episodes, in order, and what their numbers mean.

    images  {camera: uint8 [N,h,w,c]}
    state   float32 [N,S]
    task    int64 [N]    index into ``tasks``
    time    int64 [N]    control steps since the episode began
    action  float32 [N,D]  what was executed
    episode int64 [N]    0, 1, ...
    seed    int64 [N]    of the episode, -1 when unknown
    tasks   the texts of the instructions
    fps     control steps per second
    extras  {name: [N,...]}  whatever else was recorded, under the dataset's names: "next.reward", "next.success", ...
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    task: np.ndarray
    time: np.ndarray
    action: np.ndarray
    episode: np.ndarray
    seed: np.ndarray
    tasks: tuple[str, ...]
    fps: float
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    robot: str = ""

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(np.unique(self.episode))

    def spans(self) -> list[tuple[int, int]]:
        """First step and the one after the last, of every episode."""
        begins = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.episode)], strict=True))

    def observation(self) -> Observation:
        """All steps as one batch of observations."""
        return Observation(self.images, self.state, self.task, self.time)

    def chunks(self, horizon: int) -> np.ndarray:
        """The ``horizon`` actions that follow each step [N,H,D]; an episode's last action is repeated past its end."""
        last = np.searchsorted(self.episode, self.episode, side="right") - 1
        index = np.minimum(np.arange(len(self.episode))[:, None] + np.arange(horizon), last[:, None])
        return np.asarray(self.action[index])

    def with_tasks(self, tasks: Sequence[str]) -> Demonstrations:
        """The same with ``task`` counting in another table of texts, such as an environment's or a policy's.

        Raises ContractError for an instruction that occurs here and not there.
        """
        used = [self.tasks[i] for i in np.unique(self.task)]
        for text in used:
            if text not in tasks:
                raise ContractError(
                    f"the episodes have the task {text!r}, which is not in the table, so it could not be told from "
                    f"others; {did_you_mean(text, tasks)}"
                )
        numbers = np.array([tasks.index(text) if text in used else -1 for text in self.tasks], np.int64)
        return replace(self, task=numbers[self.task], tasks=tuple(tasks))

    @classmethod
    def joined(cls, parts: Sequence[Demonstrations]) -> Demonstrations:
        """``parts`` one after the other, their episodes numbered anew; raises ContractError when they do not match."""
        first = parts[0]
        tasks = tuple(dict.fromkeys(text for part in parts for text in part.tasks))
        parts = [part if part.tasks == tasks else part.with_tasks(tasks) for part in parts]
        for part in parts:
            if part.images.keys() != first.images.keys() or part.extras.keys() != first.extras.keys():
                raise ContractError(
                    f"episodes with {sorted({*part.images, *part.extras})} cannot be joined to some with "
                    f"{sorted({*first.images, *first.extras})}; leave out what they do not share."
                )
        lengths = [end - begin for part in parts for begin, end in part.spans()]
        return replace(
            first,
            images={name: np.concatenate([part.images[name] for part in parts]) for name in first.images},
            extras={name: np.concatenate([part.extras[name] for part in parts]) for name in first.extras},
            task=np.concatenate([part.task for part in parts]),
            episode=np.repeat(np.arange(len(lengths)), lengths),
            tasks=tasks,
            state=np.concatenate([part.state for part in parts]),
            time=np.concatenate([part.time for part in parts]),
            action=np.concatenate([part.action for part in parts]),
            seed=np.concatenate([part.seed for part in parts]),
        )

    def save(self, path: Path, video: str = "auto") -> None:
        """Write a LeRobotDataset v3.0 folder; a dataset that was at ``path`` is moved to ``path.1``, ``path.2``, ...

        ``video``: "never" keeps every pixel (PNG), "always" makes AV1 videos of all cameras, "auto" of those for which
        it pays (``lerobot.video.camera``).  Raises UserError when it cannot be written; nothing has changed then.
        """
        writing = path.with_name(path.name + ".writing")
        shutil.rmtree(writing, ignore_errors=True)
        try:
            with recording(writing, video) as kept:
                kept.add(self)
            move_aside(path)
            os.replace(writing, path)
        except OSError as error:
            raise UserError(
                f"the episodes could not be written to {str(path)!r} ({error.strerror}), so nothing there has changed; "
                "free some disk space or choose another folder."
            ) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)

    @classmethod
    def load(
        cls, path: Path, chosen: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
    ) -> Demonstrations:
        """Read all, or the ``chosen``, episodes of any LeRobotDataset v3.0 folder; they are numbered from 0.

        Raises UserError when it is none, and DamagedError, naming file, column and episode, when part of it cannot be
        read.  With ``on_damage`` the rest is read and each problem told instead.
        """
        parts = list(cls.stream(path, chosen, on_damage))
        if not parts:
            raise UserError(
                f"{str(path)!r} holds no readable episodes, so there is nothing to imitate; record some with 'vla-rl "
                "collect'."
            )
        return cls.joined(parts)

    @classmethod
    def stream(
        cls, path: Path, chosen: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
    ) -> Iterator[Demonstrations]:
        """Like :meth:`load` but one episode at a time, numbered as there, for what does not fit into memory."""
        episodes: Iterator[Demonstrations] = _lerobot().read(Path(path), chosen, on_damage)
        return episodes


def recording(path: Path, video: str = "auto") -> Recording:
    """A dataset that grows episode by episode, each safe on the disk when ``add`` returns; ``video`` as in ``save``.

    Leaving its ``with`` block finishes it; :func:`repair` does so for a process that was killed.
    """
    kept: Recording = _lerobot().Recording(path, video)
    return kept


def repair(path: Path) -> list[Problem]:
    """Finish the recording that a killed process left; returns what was damaged and is put aside."""
    problems: list[Problem] = _lerobot().repair(path)
    return problems


def move_aside(path: Path) -> Path | None:
    """Give a dataset at ``path`` the first free name ``path.1``, ``path.2``, ... and return it, None if there is none.

    Raises UserError when something else is there.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not ((path / "meta").is_dir() or (path / "recording").is_dir()):
        raise UserError(
            f"{str(path)!r} exists and is no dataset, so it was left alone and nothing written; choose another folder."
        )
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.replace(path, aside)
    return aside


def record(
    env: VecEnv,
    expert: Callable[[Observation], np.ndarray],
    seeds: list[int],
    report: Callable[[int], None] = lambda done: None,
) -> Demonstrations:
    """Let ``expert(obs) -> [E,1,D]`` play one episode per seed, one control step at a time, and keep the successes."""
    return Demonstrations.joined(list(demonstrations(env, expert, seeds, report)))


def demonstrations(
    env: VecEnv,
    expert: Callable[[Observation], np.ndarray],
    seeds: list[int],
    report: Callable[[int], None] = lambda done: None,
) -> Iterator[Demonstrations]:
    """What :func:`record` joins: one success after the other, as soon as their batch of rows has ended.

    Raises UserError at the end when there was none.
    """
    found = False
    for start in range(0, len(seeds), env.num_envs):
        batch = seeds[start : start + env.num_envs]
        for track in _play(env, expert, batch):
            found = True
            yield track.episode(env.spec)
        report(start + len(batch))
    if not found:
        raise UserError(
            f"none of {len(seeds)} demonstrations of {env.spec.name!r} succeeded, so there is nothing to imitate; look "
            "at the expert."
        )


@dataclass
class _Track:
    """One episode while it is played."""

    seed: int
    observations: list[Observation] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def episode(self, spec: EnvSpec) -> Demonstrations:
        """A success, whose last step brought it about."""
        count = len(self.actions)
        last = np.arange(count) == count - 1
        return Demonstrations(
            images={name: np.concatenate([obs.images[name] for obs in self.observations]) for name in spec.images},
            state=np.concatenate([obs.state for obs in self.observations]),
            task=np.concatenate([obs.task for obs in self.observations]),
            time=np.concatenate([obs.time for obs in self.observations]),
            action=np.stack(self.actions),
            episode=np.zeros(count, np.int64),
            seed=np.full(count, self.seed, np.int64),
            tasks=spec.tasks,
            fps=1.0 / spec.control_dt,
            state_names=spec.state.names,
            action_names=spec.action.names,
            extras={"next.reward": np.array(self.rewards, np.float32), "next.done": last, "next.success": last.copy()},
            robot=spec.name,
        )


def _play(env: VecEnv, expert: Callable[[Observation], np.ndarray], seeds: list[int]) -> list[_Track]:
    """One batch of episodes; rows beyond ``seeds`` replay the last seed and are not kept."""
    padded = seeds + [seeds[-1]] * (env.num_envs - len(seeds))
    obs = env.reset(np.arange(env.num_envs), np.array(padded))
    tracks = [_Track(seed) for seed in seeds]
    while True:
        step = env.step(expert(obs)[:, :1])
        for row, track in enumerate(tracks):
            if step.valid[row, 0]:
                track.observations.append(obs.select(slice(row, row + 1)))
                track.actions.append(np.array(step.executed[row, 0]))
                track.rewards.append(float(step.reward[row, 0]))
        obs = step.obs
        if step.done.all():
            return [track for row, track in enumerate(tracks) if step.success[row]]


def _lerobot() -> Any:
    """The part that needs pyarrow and PyAV."""
    try:
        from vla_rl.experience.lerobot import translate
    except ModuleNotFoundError as error:
        if error.name not in ("pyarrow", "av"):
            raise
        raise UserError(
            f"{error.name} is not installed, so datasets can be neither written nor read; pip install 'vla-rl[data]'."
        ) from error
    return translate
