"""Base class of the learned reward models: an encoder, a success score, its threshold, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import State
from vla_rl.pretrained import load_weights, read_config, save_folder
from vla_rl.rewards.calibration import Counts, choose_threshold
from vla_rl.rewards.encoder import EncoderConfig, InstructedEncoder, words_of
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.reward import RewardOutput

BATCH = 512  # images per forward pass


@dataclass(frozen=True)
class RewardModelConfig(EncoderConfig):
    """Sizes of the network, and how many frames a success must last."""

    hold: int = 3  # consecutive frames at or above the threshold; a single frame may be misclassified


class RewardModel(nn.Module):
    """A ``Reward`` with an :class:`InstructedEncoder` and a success score of single frames.

    ``threshold`` applies to the score (a logit); :meth:`calibrate` chooses it.
    """

    config: RewardModelConfig

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: RewardModelConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: the vocabulary of instructions."""
        super().__init__()
        self.config, self.threshold = config, 0.0
        self.encoder = InstructedEncoder(cameras, words, config)

    @classmethod
    def for_frames(cls, frames: LabelledFrames, config: RewardModelConfig) -> Self:
        """An untrained model with the cameras and words of ``frames``."""
        cameras = {name: image.shape[1:] for name, image in frames.images.items()}
        return cls(cameras, words_of(np.unique(frames.text)), config)

    def score(self, features: Tensor) -> Tensor:
        """The success logit [...] of frames with ``features`` [..., encoder.size]."""
        raise NotImplementedError

    def initial_state(self, num_envs: int) -> State:
        raise NotImplementedError

    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        raise NotImplementedError

    def reset_state(self, state: State, env_ids: Array) -> State:
        return reset_rows(state, self.initial_state(len(state["streak"])), env_ids)

    @torch.no_grad()
    def encode(self, images: Mapping[str, Array], text: Sequence[str] | np.ndarray) -> Tensor:
        """Features [N,encoder.size] of any number of ``images``, in batches, without gradients."""
        words, names = np.asarray(text, dtype=str), self.encoder.cameras
        parts = np.split(np.arange(len(words)), range(BATCH, len(words), BATCH))
        return torch.cat([self.encoder({name: images[name][p] for name in names}, words[p].tolist()) for p in parts])

    @torch.no_grad()
    def scores(self, frames: LabelledFrames) -> np.ndarray:
        """Success logits, float32 [N]."""
        self.encoder.check_images(frames.images, axes=1)
        return self.score(self.encode(frames.images, frames.text)).float().cpu().numpy()

    def calibrate(self, frames: LabelledFrames, precision: float) -> Counts:
        """Choose the lowest ``threshold`` with at least ``precision`` on ``frames``.

        ``frames`` must not have been trained on.  Raises UserError when there is no such threshold.
        """
        score = self.scores(frames)
        self.threshold = choose_threshold(score, frames.label, precision)
        return Counts.from_decisions(score >= self.threshold, frames.label)

    def encode_clips(self, frames: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Features [E,T,encoder.size] of the ``frames`` of :meth:`Reward.evaluate`."""
        self.encoder.check_images(frames, axes=2)
        clips = {name: self.encoder.to_tensor(frames[name]) for name in self.encoder.cameras}
        num_envs, time = next(iter(clips.values())).shape[:2]
        words = np.repeat(np.asarray(text, dtype=str), time)
        return self.encode({name: clip.flatten(0, 1) for name, clip in clips.items()}, words).unflatten(
            0, (num_envs, time)
        )

    def hold_done(self, score: Tensor, valid: np.ndarray, streak: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``done`` bool [E,T] after ``config.hold`` consecutive valid frames at the threshold, and the new ``streak``.

        ``score`` [E,T], ``valid`` bool [E,T], ``streak`` int [E]: consecutive frames at the threshold before these.
        """
        high, done = (score >= self.threshold).cpu().numpy(), np.zeros(valid.shape, bool)
        for t in range(valid.shape[1]):
            streak = np.where(valid[:, t], np.where(high[:, t], streak + 1, 0), streak)
            done[:, t] = streak >= self.config.hold
        return done, streak

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` (sizes, cameras, words, threshold) and ``model.safetensors``."""
        config = {
            "reward": name_of(type(self)),
            "config": to_json(self.config),
            "cameras": to_json(self.encoder.cameras),
            "words": list(self.encoder.words),
            "threshold": self.threshold,
        }
        save_folder(Path(folder), config, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load a checkpoint, its threshold included."""
        saved = read_config(Path(folder), "reward")
        cameras = {name: tuple(shape) for name, shape in saved["cameras"].items()}
        model = cls(cameras, saved["words"], from_json(saved["config"]))
        model.threshold = float(saved["threshold"])
        load_weights(model, Path(folder))
        return model.eval()


def reset_rows(state: State, initial: State, env_ids: Array) -> State:
    """A copy of ``state`` with the entries of ``env_ids`` (int [R]) from ``initial``."""
    env_ids = np.asarray(env_ids)
    new = {name: value.copy() for name, value in state.items()}
    for name, value in new.items():
        value[env_ids] = initial[name][env_ids]
    return new


def to_bool(valid: Array) -> np.ndarray:
    """``valid`` [E,T] as a numpy array on the host."""
    return torch.as_tensor(valid).cpu().numpy().astype(bool)
