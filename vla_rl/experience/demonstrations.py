"""Recorded episodes as arrays with one entry per control step, to imitate and to learn world models from.

On disk: ``datasets.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.trust import read_arrays, write_arrays


class _Episodes:
    """Whole episodes, one after the other, each number of ``episode`` [N] once and in order."""

    images: Mapping[str, np.ndarray]
    episode: np.ndarray

    @property
    def count(self) -> int:
        return len(self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """First entry and the one after the last, of every episode."""
        begins = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.episode)], strict=True))


def concatenated(parts: Sequence[Any]) -> dict[str, Any]:
    """The arrays of ``parts``, dataclasses of one class, end to end by field, also those in mappings."""
    found: dict[str, Any] = {}
    for name in (item.name for item in fields(parts[0])):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], Mapping):
            found[name] = {key: np.concatenate([value[key] for value in values]) for key in values[0]}
        elif isinstance(values[0], np.ndarray):
            found[name] = np.concatenate(values)
    return found


def _renumbered(parts: Sequence[Any]) -> dict[str, Any]:
    """:func:`concatenated`, with episodes renumbered from 0."""
    lengths = [end - begin for part in parts for begin, end in part.spans()]
    return concatenated(parts) | {"episode": np.repeat(np.arange(len(lengths)), lengths)}


@dataclass(frozen=True)
class Demonstrations(_Episodes):
    """``N`` control steps of whole episodes, in order, with the names and units of their numbers.

    images  {camera: uint8 [N,h,w,c]}; of a dataset's depth, uint16 or float32 [N,h,w,1] in its unit
    state   float32 [N,S]
    task    int64 [N]    index into ``tasks``
    time    int64 [N]    control steps since the episode began
    action  float32 [N,D]  executed actions
    episode int64 [N]    0, 1, ...
    seed    int64 [N]    of the episode, -1 when unknown
    tasks   the texts of the instructions
    fps     control steps per second
    extras  {name: [N,...]}  all other recorded columns, under the dataset's names: "next.reward", "next.success", ...
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

    @classmethod
    def of_episode(
        cls,
        spec: EnvSpec,
        obs: Observation,
        action: np.ndarray,
        success: bool,
        seed: int = -1,
        reward: np.ndarray | None = None,
        extras: Mapping[str, np.ndarray] | None = None,
    ) -> Demonstrations:
        """The whole episode of ``N`` control steps, before which ``obs`` was seen, in an environment like ``spec``.

        ``reward`` [N]; None: 1 at the end of a success.
        """
        count = len(action)
        last = np.arange(count) == count - 1
        paid = last & success if reward is None else reward
        ends = {"next.reward": paid.astype(np.float32), "next.done": last, "next.success": last & success}
        return cls(
            images={name: obs.images[name] for name in spec.images},
            state=obs.state,
            task=obs.task,
            time=np.arange(count),
            action=action,
            episode=np.zeros(count, np.int64),
            seed=np.full(count, seed, np.int64),
            tasks=spec.tasks,
            fps=1.0 / spec.control_dt,
            state_names=spec.state.names,
            action_names=spec.action.names,
            extras={**(extras or {}), **ends},
            robot=spec.name,
        )

    def observation(self) -> Observation:
        return Observation(self.images, self.state, self.task, self.time)

    def chunks(self, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``horizon`` actions that follow each step [N,H,D], and which of them were demonstrated, bool [N,H].

        Past an episode's end its last action is repeated; nobody demonstrated that, so no loss may count it.
        """
        last = np.searchsorted(self.episode, self.episode, side="right")[:, None] - 1
        ahead = np.arange(len(self.episode))[:, None] + np.arange(horizon)
        return np.asarray(self.action[np.minimum(ahead, last)]), ahead <= last

    def has_rate_of(self, spec: EnvSpec) -> bool:
        """Whether an action lasts as long in the episodes as in an environment like ``spec``, to a hundredth."""
        return abs(spec.control_dt * self.fps - 1.0) <= 0.01

    def for_env(self, spec: EnvSpec) -> Demonstrations:
        """:meth:`with_tasks` of ``spec``; raises ContractError where the episodes have another rate, too."""
        if not self.has_rate_of(spec):
            raise ContractError(
                f"the episodes have {self.fps:g} control steps per second and {spec.name!r} has "
                f"{1 / spec.control_dt:g}, so an action would last otherwise than when it was recorded; use episodes "
                "of that rate."
            )
        return self.with_tasks(spec.tasks)

    def successes(self) -> np.ndarray:
        """Which episodes succeeded, bool [count], by what was recorded.

        By "next.success" or "success", true in one of its steps; or by rewards of 0 and 1 ("next.reward"), a 1 for a
        success; or by "next.done" where some episodes end without it.  Raises UserError where nothing says it.
        """
        columns = {name: np.asarray(self.extras[name]) for name in _OUTCOMES if name in self.extras}
        for name, values in columns.items():
            if values.size != len(self.episode) or values.dtype.kind not in "fiub":
                continue
            recorded = [values.reshape(-1)[begin:end].astype(np.float64) for begin, end in self.spans()]
            if name == "next.done":
                found = np.array([bool(part[-1]) for part in recorded])
                if found.all():  # every episode's last step has it in most datasets
                    continue
                return found
            if all(np.isin(part, (0.0, 1.0)).all() for part in recorded):
                return np.array([bool(part.any()) for part in recorded])
        raise UserError(
            f"nothing says which of these {self.count} episodes succeeded, so good decisions cannot be told from bad "
            f'ones (columns: {", ".join(self.extras) or "none"}); add the column "next.success", true in the last step '
            "of every success, or rewards of 0 and 1 (docs/bring/dataset.md#which-episodes-succeeded)."
        )

    def of(self, chosen: np.ndarray) -> Demonstrations:
        """The episodes ``chosen`` bool [count] alone, renumbered from 0."""
        steps = np.flatnonzero(np.repeat(chosen, [end - begin for begin, end in self.spans()]))
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        parts: dict[str, Any] = {name: item[steps] for name, item in arrays.items() if isinstance(item, np.ndarray)}
        _, parts["episode"] = np.unique(parts["episode"], return_inverse=True)
        parts |= {name: {key: item[steps] for key, item in arrays[name].items()} for name in ("images", "extras")}
        return replace(self, **parts)

    def with_tasks(self, tasks: Sequence[str]) -> Demonstrations:
        """The same with ``task`` as an index into another table of texts, such as an environment's or a policy's.

        Raises ContractError for an instruction of these episodes that is not in ``tasks``.
        """
        used = [self.tasks[i] for i in np.unique(self.task)]
        for text in used:
            if text not in tasks:
                raise ContractError(
                    f"the episodes have the task {text!r}, which is not in the table, so it could not be "
                    f"distinguished from others; {did_you_mean(text, tasks)}"
                )
        numbers = np.array([tasks.index(text) if text in used else -1 for text in self.tasks], np.int64)
        return replace(self, task=numbers[self.task], tasks=tuple(tasks))

    @classmethod
    def joined(cls, parts: Sequence[Demonstrations]) -> Demonstrations:
        """``parts`` concatenated, with episodes renumbered from 0.

        Raises ContractError when their columns differ, or their rates: chunks of actions would last differently long.
        """
        first = parts[0]
        tasks = tuple(dict.fromkeys(text for part in parts for text in part.tasks))
        parts = [part if part.tasks == tasks else part.with_tasks(tasks) for part in parts]
        for part in parts:
            if abs(part.fps / first.fps - 1.0) > 0.01:
                raise ContractError(
                    f"episodes of {part.fps:g} control steps per second cannot be joined to episodes of {first.fps:g}, "
                    "since a chunk of actions would mean another time in each; learn from those of one rate."
                )
            if part.images.keys() != first.images.keys() or part.extras.keys() != first.extras.keys():
                raise ContractError(
                    f"episodes with {sorted({*part.images, *part.extras})} cannot be joined to episodes with "
                    f"{sorted({*first.images, *first.extras})}; leave out the columns that they do not share."
                )
        return replace(first, tasks=tasks, **_renumbered(parts))


_OUTCOMES = ("next.success", "success", "next.reward", "next.done")  # columns, in the order in which they are believed


@dataclass(frozen=True)
class Trajectories(_Episodes):
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
    def steps(self) -> int:
        return len(self.state) - self.count

    @property
    def outcomes(self) -> np.ndarray:
        """bool [count]: which episodes succeeded."""
        return self.success[self.ends - 1]

    @property
    def ends(self) -> np.ndarray:
        """int64 [count]: one after the last time step of every episode."""
        return np.append(np.flatnonzero(np.diff(self.episode)) + 1, len(self.episode))

    def recorded_rewards(self) -> np.ndarray:
        """float32 [steps]: the reward of every action; raises UserError where an episode has none recorded."""
        actions = np.ones(len(self.state), bool)
        actions[self.ends - 1] = False
        rewards: np.ndarray = self.reward[actions]
        if (unknown := np.isnan(rewards)).any():
            missing = len(np.unique(self.episode[actions][unknown]))
            raise UserError(
                f"{missing} of {self.count} episodes have no rewards recorded, as those of datasets without "
                "'next.reward', so a world model cannot learn what they were rewarded with; collect them again in a "
                "new run, or leave the head out (plan.model.reward)."
            )
        return rewards

    def select(self, episodes: Sequence[int] | np.ndarray) -> Trajectories:
        """Those ``episodes`` alone, renumbered from 0 in the order given."""
        spans = self.spans()
        steps = [np.arange(*spans[i]) for i in episodes]
        index = np.concatenate([*steps, np.zeros(0, int)])
        parts = {name: getattr(self, name)[index] for name in _NAMES}
        images = {name: image[index] for name, image in self.images.items()}
        return Trajectories(images, **parts | {"episode": np.repeat(np.arange(len(steps)), [len(it) for it in steps])})

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """``parts`` concatenated; raises ContractError when their cameras differ."""
        for part in parts:
            if part.images.keys() != parts[0].images.keys():
                raise ContractError(
                    f"trajectories with the cameras {sorted(part.images)} cannot be joined to some with "
                    f"{sorted(parts[0].images)}; record the same ones."
                )
        return cls(**_renumbered(parts))

    def save(self, path: Path) -> None:
        """Write every pixel and number to one ``.npz``; :meth:`load` reads it."""
        images = {f"images/{name}": image for name, image in self.images.items()}
        write_arrays(path, images | {name: getattr(self, name) for name in _NAMES})

    @classmethod
    def load(cls, path: Path) -> Trajectories:
        """Read a file of :meth:`save`; raises UserError for a missing, damaged or other file."""
        try:
            file = read_arrays(path)
            images = {name.removeprefix("images/"): file[name] for name in file if name.startswith("images/")}
            return cls(images, **{name: file[name] for name in _NAMES})
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
        unknown = np.full(len(action), np.nan)
        reward = np.array(episodes.extras.get("next.reward", unknown), np.float32).reshape(-1)
        reward[last - 1] += reward[last]
        reward[last] = 0.0  # also what an episode of one action added to its neighbour's end
        kept = {name: getattr(episodes, name) for name in ("state", "task", "episode", "seed")}
        return cls(episodes.images, action=action, success=success, failed=failed, reward=reward, **kept)


_NAMES = ("state", "action", "task", "success", "failed", "episode", "seed", "reward")


def make_sequences(trajectories: Trajectories, frames: int, context: int) -> dict[str, np.ndarray]:
    """A table with one sequence per time step that has a successor: its context frames and the next two calls' frames.

    One call of the model predicts ``frames`` control steps.  The table holds indices and small arrays only;
    :func:`sequence_batch` loads the pictures.

    past    int64 [N,1+context]  time steps: the episode's first, then ``context`` steps ``frames`` apart up to the
                                 present one
    future  int64 [N,2*frames]   the time steps that follow; an episode's last is repeated past its end
    count   int64 [N]            how many of ``future`` lie inside the episode
    """
    past, future, count = [], [], []
    back = np.arange(context - 1, -1, -1) * frames
    for begin, end in trajectories.spans():
        present = np.arange(begin, end - 1)
        recent = np.maximum(present[:, None] - back, begin)
        past.append(np.concatenate([np.full((len(present), 1), begin), recent], 1))
        future.append(np.minimum(present[:, None] + 1 + np.arange(2 * frames), end - 1))
        count.append(np.minimum(end - 1 - present, 2 * frames))
    return {"past": np.concatenate(past), "future": np.concatenate(future), "count": np.concatenate(count)}


def context_at(trajectories: Trajectories, steps: np.ndarray, frames: int, context: int) -> dict[str, np.ndarray]:
    """Context frames, state, task and clock at the time steps ``steps`` [N], as ``InitialStates`` has them."""
    begins = np.array([begin for begin, _ in trajectories.spans()])
    first = begins[np.searchsorted(begins, steps, side="right") - 1][:, None]
    recent = np.maximum(steps[:, None] - np.arange(context - 1, -1, -1) * frames, first)
    return {
        "pictures": _pictures(trajectories, np.concatenate([first, recent], 1)),
        "state": trajectories.state[steps],
        "task": trajectories.task[steps],
        "time": steps - first[:, 0],
    }


def call_batch(trajectories: Trajectories, table: Mapping[str, np.ndarray], index: np.ndarray) -> dict[str, np.ndarray]:
    """The first call of the sequences ``index`` [B] of ``table``, with the picture before it.

    pictures uint8 [B,C,h,w], state [B,1+F,S], actions [B,F,D], count [B]
    """
    frames = table["future"].shape[1] // 2
    steps = np.concatenate([table["past"][index, -1:], table["future"][index, :frames]], 1)
    return {
        "state": trajectories.state[steps],
        "actions": trajectories.action[steps[:, :-1]],
        "pictures": _pictures(trajectories, steps[:, 0]),
        "count": np.minimum(table["count"][index], frames),
    }


def frames_at(trajectories: Trajectories, steps: np.ndarray) -> dict[str, np.ndarray]:
    """State [N,S] and pictures uint8 [N,C,h,w] at the time steps ``steps`` [N]."""
    return {"state": trajectories.state[steps], "pictures": _pictures(trajectories, steps)}


def sequence_batch(
    trajectories: Trajectories, table: Mapping[str, np.ndarray], index: np.ndarray
) -> dict[str, np.ndarray]:
    """The sequences ``index`` [B] of ``table``, as ``WorldModel.loss`` takes them.

    pictures uint8 [B,1+context+2*frames,C,h,w], cameras side by side in ``C``; state [B,1+2*frames,S], actions
    [B,2*frames,D] and their reward float32 [B,2*frames], task [B], count [B]; outcome float32 [B,2*frames,3]: success
    so far, failure so far, and whether the episode succeeds in the end
    """
    past, future = table["past"][index], table["future"][index]
    present = past[:, -1:]
    succeeds = trajectories.outcomes[np.searchsorted(trajectories.ends, future, side="right")]
    outcome = np.stack([trajectories.success[future], trajectories.failed[future], succeeds], -1).astype(np.float32)
    return {
        "pictures": _pictures(trajectories, np.concatenate([past, future], 1)),
        "state": trajectories.state[np.concatenate([present, future], 1)],
        "actions": trajectories.action[np.concatenate([present, future[:, :-1]], 1)],
        "task": trajectories.task[present[:, 0]],
        "count": table["count"][index],
        "outcome": outcome,
        "reward": trajectories.reward[np.concatenate([present, future[:, :-1]], 1)],
    }


def _pictures(trajectories: Trajectories, steps: np.ndarray) -> np.ndarray:
    """uint8 [...,C,h,w] at the time steps ``steps`` [...], cameras in the order of their names."""
    pictures = np.concatenate([trajectories.images[name][steps] for name in sorted(trajectories.images)], -1)
    return np.moveaxis(pictures, -1, -3)
