"""Training windows for a world model, cut from trajectories: index tables and the batches they select."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_rl.experience.trajectories import Trajectories


def make_windows(trajectories: Trajectories, frames: int, context: int) -> dict[str, np.ndarray]:
    """A table with one window per time step that has a successor: its context frames and the next two calls' frames.

    One call of the model predicts ``frames`` control steps.  The table holds indices and small arrays only;
    :func:`window_batch` loads the pictures.

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
    """The first call of the windows ``index`` [B] of ``table``, with the picture before it.

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


def window_batch(
    trajectories: Trajectories, table: Mapping[str, np.ndarray], index: np.ndarray
) -> dict[str, np.ndarray]:
    """The windows ``index`` [B] of ``table``, as ``WorldModel.loss`` takes them.

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
