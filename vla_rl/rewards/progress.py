"""A pairwise progress critic: how much closer to the instructed goal is the second of two frames than the first?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array
from vla_rl.contract.policy import State
from vla_rl.rewards.frames import FramePairs, LabelledFrames
from vla_rl.rewards.reward_model import RewardModel, RewardModelConfig, RewardOutput, to_bool

_NO_REFERENCE = -1  # age of the reference before the first frame


@dataclass(frozen=True)
class ProgressConfig(RewardModelConfig):
    """Sizes of the network, and how frames are compared."""

    stride: int = 5  # frames from one reference to the next
    floor: float = 0.1  # remainder of a finished task; see ``ProgressCritic``


class ProgressCritic(RewardModel):
    """Compares two frames of one episode given its instruction (a ``Reward``), after VLAC.

    VLAC (Zhai et al. 2025, arXiv 2509.15937; github.com/InternRobotics/VLAC, ``critic_to_value_simple``) asks a VLM for
    ``c`` in (-1, 1): the share of the remaining task at the first frame that is done at the second, negative for a step
    back.  The value ``v`` of the first frame then gives the value of the second:

        v' = v + (1 - v) c             for c >= 0
        v' = 1 - (1 - v) / (1 + c)     for c < 0, the inverse of the first

    Here a small network predicts ``u = log((1 - v) / (1 - v'))``, and ``c = sign(u) (1 - exp(-|u|))``; both lines then
    become ``1 - v' = (1 - v) exp(-u)``.  By construction ``u(a, b) = -u(b, a)``, so that equal frames have no progress
    between them.

    For a finished task ``u`` would be infinite, so VLAC bounds the remainder from below by 1 % in its second line.
    Here the bound is part of the definition, ``v = (1 - floor) progress``, in training and in use, so that progress can
    also be lost again after the task was finished.

    ``progress`` is 0 at an episode's first frame.  Every frame is compared with a reference that is at most ``stride``
    frames older.  ``done`` does not depend on ``progress``, which accumulates errors, but on a score of the single
    frame: it needs ``config.hold`` consecutive frames that reach ``threshold``.
    """

    config: ProgressConfig

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: ProgressConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: the vocabulary of instructions."""
        super().__init__(cameras, words, config)
        size, width = self.encoder.size, 2 * config.width
        self.comparison = nn.Sequential(nn.Linear(2 * size, width), nn.SiLU(), nn.Linear(width, 1))
        self.completion = nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, 1))

    def score(self, features: Tensor) -> Tensor:
        return self.completion(features)[..., 0]

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """``u`` [...] between frames whose features are ``first`` and ``second`` [...,encoder.size]."""
        forward, backward = (self.comparison(torch.cat(pair, -1)) for pair in ((first, second), (second, first)))
        return (forward - backward)[..., 0]

    @torch.no_grad()
    def difference(self, first: Mapping[str, Array], second: Mapping[str, Array], text: Sequence[str]) -> np.ndarray:
        """``c`` float32 [N], the signed progress from ``first`` to ``second`` {camera: uint8 [N,h,w,3]}."""
        u = self.compare(self.encode(first, text), self.encode(second, text)).float().cpu().numpy()
        return np.sign(u) * -np.expm1(-np.abs(u))

    # -- training ---------------------------------------------------------------------------------------------------

    def loss(self, pairs: FramePairs) -> tuple[Tensor, dict[str, float]]:
        """Squared error of ``u`` plus the binary cross-entropy of the second frame's success label."""
        first = self.encoder(pairs.first.images, pairs.first.text)
        second = self.encoder(pairs.second.images, pairs.second.text)
        u, score = self.compare(first, second), self.score(second)
        remaining = [
            1 - (1 - self.config.floor) * self.encoder.to_tensor(p).to(u.dtype) for p in (pairs.before, pairs.after)
        ]
        target, label = (remaining[0] / remaining[1]).log(), self.encoder.to_tensor(pairs.second.label)
        change = nn.functional.mse_loss(u, target)
        completion = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        moved = target != 0
        info = {
            "change": float(change.detach()),
            "completion": float(completion.detach()),
            "ordered": float(((u > 0) == (target > 0))[moved].float().mean()) if moved.any() else 1.0,
        }
        return change + completion, info

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        """The reference frame, its age in frames, the remainder of the task in it, and the streak of ``hold_done``."""
        images = {
            f"reference/{name}": np.zeros((num_envs, *shape), np.uint8) for name, shape in self.encoder.cameras.items()
        }
        age, remaining = np.full(num_envs, _NO_REFERENCE, np.int64), np.ones(num_envs, np.float32)
        return {**images, "age": age, "remaining": remaining, "streak": np.zeros(num_envs, np.int64)}

    @torch.no_grad()
    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        self.encoder.check_images(frames, axes=2)
        valid = to_bool(valid)
        images = {name: np.asarray(torch.as_tensor(frames[name]).cpu()) for name in self.encoder.cameras}
        old = {name: state[f"reference/{name}"][:, None] for name in self.encoder.cameras}
        clips = {name: np.concatenate([old[name], images[name]], 1) for name in images}
        features = self.encode_clips(clips, text)
        done, streak = self.hold_done(self.score(features[:, 1:]), valid, state["streak"])
        progress, reference, age, remaining = self._accumulate(features, valid, state["age"], state["remaining"])
        env_ids = np.arange(len(reference))
        images = {f"reference/{name}": clip[env_ids, reference] for name, clip in clips.items()}
        return RewardOutput(progress, done), {**images, "age": age, "remaining": remaining, "streak": streak}

    def _accumulate(
        self, features: Tensor, valid: np.ndarray, age: np.ndarray, remaining: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Progress [E,T] along ``features`` [E,1+T,F]; then index, age and remainder of each new reference [E]."""
        num_envs, time = valid.shape
        env_ids, reference = np.arange(num_envs), np.zeros(num_envs, np.int64)
        progress = np.zeros((num_envs, time), np.float32)
        for t in range(time):
            u = self.compare(features[env_ids, reference], features[:, 1 + t]).float().cpu().numpy()
            left = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)
            left = np.where(age == _NO_REFERENCE, 1.0, left).astype(np.float32)
            progress[:, t] = (1 - left) / (1 - self.config.floor)
            age = np.where(valid[:, t], age + 1, age)
            moves = valid[:, t] & ((age == 0) | (age == self.config.stride))
            reference, age = np.where(moves, 1 + t, reference), np.where(moves, 0, age)
            remaining = np.where(moves, left, remaining)
        return progress, reference, age, remaining


@dataclass(frozen=True)
class SuccessConfig(RewardModelConfig):
    """Sizes of the network, and how many frames a success must last."""


class SuccessClassifier(RewardModel):
    """Classifies single frames by features of an ``InstructedEncoder`` (a ``Reward``).

    ``progress`` is the probability that the frame shows success, for the share of successes in the training data;
    ``done`` needs ``config.hold`` consecutive frames whose score reaches ``threshold``.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: SuccessConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: the vocabulary of instructions."""
        super().__init__(cameras, words, config)
        self.head = nn.Sequential(
            nn.Linear(self.encoder.size, 2 * config.width), nn.SiLU(), nn.Linear(2 * config.width, 1)
        )

    def score(self, features: Tensor) -> Tensor:
        return self.head(features)[..., 0]

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Success logits [B] of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        return self.score(self.encoder(images, text))

    def loss(self, frames: LabelledFrames) -> tuple[Tensor, dict[str, float]]:
        """Binary cross-entropy of ``frames``, and the accuracy at a threshold of 0."""
        score, label = self(frames.images, frames.text), self.encoder.to_tensor(frames.label)
        loss = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        return loss, {"accuracy": float(((score.detach() > 0) == label).float().mean())}

    def initial_state(self, num_envs: int) -> State:
        return {"streak": np.zeros(num_envs, np.int64)}

    @torch.no_grad()
    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        score = self.score(self.encode_clips(frames, text))
        done, streak = self.hold_done(score, to_bool(valid), state["streak"])
        return RewardOutput(score.sigmoid().float().cpu().numpy(), done), {"streak": streak}
