"""A pairwise progress critic: how much nearer to what was asked for is the second of two pictures than the first?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array
from vla_rl.contract.policy import State
from vla_rl.rewards.pairs import FramePairs
from vla_rl.rewards.reward import Judgement
from vla_rl.rewards.trained import TrainedConfig, TrainedReward, as_bool

_NEVER = -1  # no frame has been seen that the next could be compared with


@dataclass(frozen=True)
class ProgressConfig(TrainedConfig):
    """Sizes of the network, and how it judges."""

    stride: int = 5  # frames between one that is compared with and the next such
    floor: float = 0.1  # what counts as remaining of a finished task; see ``ProgressCritic``


class ProgressCritic(TrainedReward):
    """Compares two frames of one episode under its instruction (a ``Reward``), in the manner of VLAC.

    VLAC (Zhai et al. 2025, arXiv 2509.15937; github.com/InternRobotics/VLAC, ``critic_to_value_simple``) asks a VLM for
    ``c`` in (-1, 1): which share of what remained to be done at the first frame is done at the second, less than zero
    for a step back.  From the value ``v`` at the first follows the one at the second:

        v' = v + (1 - v) c             for c >= 0
        v' = 1 - (1 - v) / (1 + c)     for c < 0, which undoes the first

    Here a small network is asked for ``u = log((1 - v) / (1 - v'))``, of which ``c = sign(u) (1 - exp(-|u|))``; both
    lines are then one, ``1 - v' = (1 - v) exp(-u)``.  Two things are so by construction: ``u(a, b) = -u(b, a)``, and so
    no progress lies between equal pictures.

    At a finished task all is done and ``u`` is infinite, for which VLAC bounds the remainder from below by 1 % in its
    second line.  Here this is part of the definition: ``v = (1 - floor) progress``, in what is learnt and in what is
    judged, so that a finished task can be undone as well.

    ``progress`` starts at 0 with a row's first frame, wherever that is.  Every frame is compared with one that is at
    most ``stride`` frames older.  ``done`` does not follow from ``progress``, in which errors add up, but from a score
    of the single frame: it needs ``config.hold`` frames in a row that reach ``threshold``.
    """

    config: ProgressConfig

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: ProgressConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: what instructions may consist of."""
        super().__init__(cameras, words, config)
        size, width = self.encoder.size, 2 * config.width
        self.comparison = nn.Sequential(nn.Linear(2 * size, width), nn.SiLU(), nn.Linear(width, 1))
        self.completion = nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, 1))

    def score(self, seen: Tensor) -> Tensor:
        logit: Tensor = self.completion(seen)[..., 0]
        return logit

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """``u`` [...] between frames whose features are ``first`` and ``second`` [...,encoder.size]."""
        there, back = (self.comparison(torch.cat(pair, -1)) for pair in ((first, second), (second, first)))
        u: Tensor = (there - back)[..., 0]
        return u

    @torch.no_grad()
    def difference(self, first: Mapping[str, Array], second: Mapping[str, Array], text: Sequence[str]) -> np.ndarray:
        """``c`` float32 [N], the signed progress from ``first`` to ``second`` {camera: uint8 [N,h,w,3]}."""
        u = self.compare(self.see(first, text), self.see(second, text)).float().cpu().numpy()
        share: np.ndarray = np.sign(u) * -np.expm1(-np.abs(u))
        return share

    # -- learning ---------------------------------------------------------------------------------------------------

    def loss(self, pairs: FramePairs) -> tuple[Tensor, dict[str, float]]:
        """Squared error of ``u`` plus the binary cross-entropy of whether the second frame shows success."""
        first = self.encoder(pairs.first.images, pairs.first.text)
        second = self.encoder(pairs.second.images, pairs.second.text)
        u, score = self.compare(first, second), self.score(second)
        left = [1 - (1 - self.config.floor) * self.encoder.tensor(p).to(u.dtype) for p in (pairs.before, pairs.after)]
        wanted, label = (left[0] / left[1]).log(), self.encoder.tensor(pairs.second.label)
        change = nn.functional.mse_loss(u, wanted)
        completion = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        moved = wanted != 0
        info = {
            "change": float(change.detach()),
            "completion": float(completion.detach()),
            "ordered": float(((u > 0) == (wanted > 0))[moved].float().mean()) if moved.any() else 1.0,
        }
        return change + completion, info

    # -- judging ----------------------------------------------------------------------------------------------------

    def initial_state(self, rows: int) -> State:
        """The frame that the next are compared with, its age in frames, what remained to be done in it, the streak."""
        pictures = {
            f"reference/{name}": np.zeros((rows, *shape), np.uint8) for name, shape in self.encoder.cameras.items()
        }
        age, remaining = np.full(rows, _NEVER, np.int64), np.ones(rows, np.float32)
        return {**pictures, "age": age, "remaining": remaining, "streak": np.zeros(rows, np.int64)}

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        self.encoder.check(frames, axes=2)
        valid = as_bool(valid)
        pictures = {name: np.asarray(torch.as_tensor(frames[name]).cpu()) for name in self.encoder.cameras}
        old = {name: state[f"reference/{name}"][:, None] for name in self.encoder.cameras}
        clips = {name: np.concatenate([old[name], pictures[name]], 1) for name in pictures}
        seen = self.see_clips(clips, text)
        done, streak = self.held(self.score(seen[:, 1:]), valid, state["streak"])
        progress, at, age, remaining = self._follow(seen, valid, state["age"], state["remaining"])
        each = np.arange(len(at))
        kept = {f"reference/{name}": clip[each, at] for name, clip in clips.items()}
        return Judgement(progress, done), {**kept, "age": age, "remaining": remaining, "streak": streak}

    def _follow(
        self, seen: Tensor, valid: np.ndarray, age: np.ndarray, remaining: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Progress [E,T] along ``seen`` [E,1+T,F] from its first; then where its new reference is, its age and rest."""
        rows, time = valid.shape
        each, at, progress = np.arange(rows), np.zeros(rows, np.int64), np.zeros((rows, time), np.float32)
        for t in range(time):
            u = self.compare(seen[each, at], seen[:, 1 + t]).float().cpu().numpy()
            rest = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)
            rest = np.where(age == _NEVER, 1.0, rest).astype(np.float32)
            progress[:, t] = (1 - rest) / (1 - self.config.floor)
            age = np.where(valid[:, t], age + 1, age)
            moves = valid[:, t] & ((age == 0) | (age == self.config.stride))
            at, age = np.where(moves, 1 + t, at), np.where(moves, 0, age)
            remaining = np.where(moves, rest, remaining)
        return progress, at, age, remaining
