"""What the reward models that are trained here have in common: a score of success, its threshold, a folder."""

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
from vla_rl.contract.policy import State
from vla_rl.pretrained import load_weights, read_config, save_folder
from vla_rl.rewards.calibration import Counts, choose_threshold
from vla_rl.rewards.encoder import EncoderConfig, InstructedEncoder, words_of
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.reward import Judgement

PART = 512  # pictures looked at together


@dataclass(frozen=True)
class TrainedConfig(EncoderConfig):
    """Sizes of the network, and for how long a success must last to be one."""

    hold: int = 3  # frames in a row at or above the threshold; one frame may be mistaken


class TrainedReward(nn.Module):
    """A ``Reward`` that sees through an :class:`InstructedEncoder` and scores single frames, among what else it does.

    ``threshold`` is that of the score (a logit): see :meth:`calibrate`.
    """

    config: TrainedConfig

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: TrainedConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: what instructions may consist of."""
        super().__init__()
        self.config, self.threshold = config, 0.0
        self.encoder = InstructedEncoder(cameras, words, config)

    @classmethod
    def for_frames(cls, frames: LabelledFrames, config: TrainedConfig) -> Self:
        """An untrained one with the cameras and words of ``frames``."""
        cameras = {name: image.shape[1:] for name, image in frames.images.items()}
        return cls(cameras, words_of(np.unique(frames.text)), config)

    def score(self, seen: Tensor) -> Tensor:
        """The logit of success [...] of a frame whose features are ``seen`` [..., encoder.size]."""
        raise NotImplementedError

    def initial_state(self, rows: int) -> State:
        raise NotImplementedError

    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        raise NotImplementedError

    def reset_state(self, state: State, rows: Array) -> State:
        return reset(state, self.initial_state(len(state["streak"])), rows)

    @torch.no_grad()
    def see(self, images: Mapping[str, Array], text: Sequence[str] | np.ndarray) -> Tensor:
        """Features [N,encoder.size] of any number of ``images``, a part at a time, without gradients."""
        words, names = np.asarray(text, dtype=str), self.encoder.cameras
        parts = np.split(np.arange(len(words)), range(PART, len(words), PART))
        return torch.cat([self.encoder({name: images[name][p] for name in names}, words[p].tolist()) for p in parts])

    @torch.no_grad()
    def scores(self, frames: LabelledFrames) -> np.ndarray:
        """float32 [N], the logits of success."""
        self.encoder.check(frames.images, axes=1)
        return self.score(self.see(frames.images, frames.text)).float().cpu().numpy()

    def calibrate(self, frames: LabelledFrames, precision: float) -> Counts:
        """Choose the lowest ``threshold`` that is right in at least ``precision`` of the ``frames`` that reach it.

        ``frames`` must not have been learnt from.  Raises UserError when there is no such threshold.
        """
        score = self.scores(frames)
        self.threshold = choose_threshold(score, frames.label, precision)
        return Counts.of_decisions(score >= self.threshold, frames.label)

    def see_clips(self, frames: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Features [E,T,encoder.size] of the frames that :meth:`Reward.judge` is given."""
        self.encoder.check(frames, axes=2)
        clips = {name: self.encoder.tensor(frames[name]) for name in self.encoder.cameras}
        rows, time = next(iter(clips.values())).shape[:2]
        words = np.repeat(np.asarray(text, dtype=str), time)
        return self.see({name: clip.flatten(0, 1) for name, clip in clips.items()}, words).unflatten(0, (rows, time))

    def held(self, score: Tensor, valid: np.ndarray, streak: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``done`` bool [E,T], where ``config.hold`` valid frames in a row reach the threshold, and the new ``streak``.

        ``score`` [E,T], ``valid`` bool [E,T], ``streak`` int [E]: how many in a row have done so until now.
        """
        high, done = (score >= self.threshold).cpu().numpy(), np.zeros(valid.shape, bool)
        for t in range(valid.shape[1]):
            streak = np.where(valid[:, t], np.where(high[:, t], streak + 1, 0), streak)
            done[:, t] = streak >= self.config.hold
        return done, streak

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` (sizes, cameras, words, threshold) and ``model.safetensors``."""
        config = {
            "reward": f"{type(self).__module__}:{type(self).__qualname__}",
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


def reset(state: State, fresh: State, rows: Array) -> State:
    """A copy of ``state`` in which ``rows`` (int [R]) are as in ``fresh``."""
    rows = np.asarray(rows)
    kept = {name: value.copy() for name, value in state.items()}
    for name, value in kept.items():
        value[rows] = fresh[name][rows]
    return kept


def as_bool(valid: Array) -> np.ndarray:
    """``valid`` [E,T] as a numpy array, wherever it is."""
    return torch.as_tensor(valid).cpu().numpy().astype(bool)
