"""Base class of the learned reward models: an encoder, a success score, its threshold, and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl import pretrained
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import State
from vla_rl.pretrained import load_weights, read_config, save_folder
from vla_rl.rewards.frames import LabelledFrames


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the network."""

    width: int = 32
    stem: int = 16  # channels of the first layer, which the instruction modulates
    keypoints: int = 4  # attended positions in an image


class InstructedEncoder(nn.Module):
    """A small convolutional network whose first layer is modulated by the instruction.

    A GRU reads the instruction word by word; its last state scales and shifts the channels of the first layer (FiLM,
    Perez et al. 2017, arXiv 1709.07871; they modulate all layers, here it is the first, where colours are still
    separate).  The output is the features at a few attended keypoints and the keypoints' coordinates, for every camera.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: EncoderConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: the vocabulary of instructions."""
        super().__init__()
        self.cameras, self.words = dict(sorted(cameras.items())), tuple(words)
        width, stem = config.width, config.stem
        self._index = {word: i + 1 for i, word in enumerate(self.words)}
        self.embedding = nn.Embedding(len(self.words) + 1, width, padding_idx=0)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.gate = nn.Linear(width, 2 * stem)
        self.first = nn.Conv2d(3, stem, 5, 2, 2)
        self.second = nn.Conv2d(stem, width, 3, 2, 1)
        self.third, self.fourth = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.attention = nn.Conv2d(width, config.keypoints, 1)
        self.size = len(self.cameras) * config.keypoints * (width + 2)

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Features [B,size] of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        self.check_images(images, axes=1)
        scale, shift = self.gate(self.encode_text(text))[..., None, None].chunk(2, 1)
        return torch.cat([self._encode_image(self.to_tensor(images[name]), scale, shift) for name in self.cameras], -1)

    def encode_text(self, text: Sequence[str]) -> Tensor:
        """Features [B,width] of the instructions ``text`` [B]; each distinct one is encoded once.

        Raises ContractError for a word outside the vocabulary.
        """
        distinct, inverse = np.unique(np.asarray(text, dtype=str), return_inverse=True)
        tokenized = [self._tokenize(str(text)) for text in distinct]
        tokens = nn.utils.rnn.pad_sequence(tokenized, batch_first=True).to(self.gate.weight.device)
        states, _ = self.reader(self.embedding(tokens))
        last = (tokens > 0).sum(1) - 1
        return states[torch.arange(len(tokenized)), last][torch.as_tensor(inverse)]

    def check_images(self, images: Mapping[str, Array], axes: int) -> None:
        """Raise ContractError unless ``images`` hold all cameras in their sizes, after ``axes`` leading axes."""
        given = {name: tuple(image.shape[axes:]) for name, image in images.items() if name in self.cameras}
        if given != self.cameras:
            raise ContractError(
                f"the reward model was made for images {self.cameras} but got {given}, so its output would mean "
                "nothing; give it these cameras and sizes, or train one for others."
            )

    def to_tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, device=self.gate.weight.device)

    def _tokenize(self, text: str) -> Tensor:
        words = _split(text)
        unknown = [word for word in words if word not in self._index]
        if unknown or not words:
            reason = f"the word {unknown[0]!r} is not in its vocabulary" if unknown else "it has no words"
            raise ContractError(
                f"the reward model cannot evaluate {text!r} because {reason}; use the words "
                f"{', '.join(self.words)}, or train one with frames under that text."
            )
        return torch.tensor([self._index[word] for word in words])

    def _encode_image(self, image: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Features and coordinates [B, keypoints*(width+2)] of the keypoints in ``image`` uint8 [B,h,w,3]."""
        pixels = image.permute(0, 3, 1, 2).to(scale.dtype) / 127.5 - 1.0
        features = nn.functional.silu(self.first(pixels) * (1 + scale) + shift)
        features = nn.functional.silu(self.second(features))
        features = nn.functional.silu(self.fourth(features + nn.functional.silu(self.third(features))))
        weight = self.attention(features).flatten(2).softmax(-1)
        sides = features.shape[2:]
        y, x = (torch.linspace(-1, 1, side, device=features.device, dtype=features.dtype) for side in sides)
        grid = torch.cartesian_prod(y, x).flip(-1)
        return torch.cat([weight @ features.flatten(2).transpose(1, 2), weight @ grid], -1).flatten(1)


def words_of(texts: Iterable[str]) -> list[str]:
    """The sorted distinct words of ``texts``."""
    return sorted({word for text in texts for word in _split(text)})


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


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


@dataclass(frozen=True)
class Counts:
    """Counts over ``total`` decisions: predicted positive, actually positive, and both (true positives)."""

    true_positives: int
    predicted: int
    actual: int
    total: int

    @classmethod
    def from_decisions(cls, predicted: np.ndarray, actual: np.ndarray) -> Counts:
        """From predictions and labels, both bool [N]."""
        return cls(int((predicted & actual).sum()), int(predicted.sum()), int(actual.sum()), predicted.size)


def choose_threshold(score: np.ndarray, label: np.ndarray, precision: float) -> float:
    """The lowest threshold with at least ``precision`` among the frames at or above it.

    ``score`` float [N], ``label`` bool [N].  The threshold lies half-way between the lowest score at or above it and
    the next lower one (half a unit below the lowest, if all are above); equal scores are never separated.  Precision is
    what counts, because RL exploits false positives, while false negatives only cost time.
    Raises UserError when no threshold has this precision.
    """
    order = np.argsort(-score, kind="stable")
    sorted_score, positives = score[order].astype(np.float64), np.cumsum(label[order])
    achieved = positives / np.arange(1, len(score) + 1)
    last_of_ties = np.append(sorted_score[1:] < sorted_score[:-1], True)
    good = np.flatnonzero(last_of_ties & (achieved >= precision) & (positives > 0))
    if not good.size:
        best = achieved[last_of_ties].max(initial=0.0)
        raise UserError(
            f"no threshold has a precision of {precision:.0%} (at best {best:.0%} on {len(score)} labelled frames), so "
            "this classifier would reward failures; train it longer, label more frames, or lower the precision."
        )
    k = int(good[-1])
    below = sorted_score[k + 1] if k + 1 < len(score) else sorted_score[k] - 1.0
    return float((sorted_score[k] + below) / 2)


def value_order_correlation(value: np.ndarray) -> float:
    """Spearman's rank correlation of ``value`` [T] with time, -1 to 1; ties share their mean rank.

    VOC of GVL (Ma et al. 2024, arXiv 2411.04549): 1 for strictly increasing values, 0 for constant ones.
    """
    below = (value[:, None] > value).sum(1) + 0.5 * (value[:, None] == value).sum(1)
    rank, time = below - below.mean(), np.arange(len(value)) - (len(value) - 1) / 2
    size = float(np.sqrt((rank**2).sum() * (time**2).sum()))
    return float(rank @ time) / size if size else 0.0


@dataclass(frozen=True)
class RewardOutput:
    """The output of a reward model for ``T`` frames of each of ``E`` environments.

    progress  float32 [E,T]  0 (nothing is done) to 1 (the task is done)
    done      bool [E,T]     the task is done; not latched, so an episode ends at the first True
    """

    progress: np.ndarray
    done: np.ndarray


@runtime_checkable
class Reward(Protocol):
    """Evaluates images and instructions only, so that it works in simulators, world models and on robots.

    What it remembers between calls (earlier frames, durations) is its ``state``, with one entry per environment; the
    caller resets it with the environment.
    """

    def initial_state(self, num_envs: int) -> State:
        """The state of ``num_envs`` environments before their first frame, {name: [E,...]}."""

    def reset_state(self, state: State, env_ids: Array) -> State:
        """``state`` with the initial one in ``env_ids`` (int [R]): their next frame is the first of an episode."""

    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        """Evaluate the next ``T`` frames of every environment, in order.

        ``frames`` {camera: uint8 [E,T,h,w,c]}, ``text`` [E] instructions, ``valid`` bool [E,T]: False where a frame
        repeats the one before it because the episode has ended.  Raises ContractError for cameras or image sizes that
        do not fit the model, and for unknown words.
        """


def load_reward(folder: str | Path) -> Any:
    """The reward model in a checkpoint folder, by the class that wrote it."""
    return pretrained.load_module(folder, "reward")
