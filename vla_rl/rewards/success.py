"""A success classifier: does this picture show that what the instruction asks for is done?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import State
from vla_rl.pretrained import load_weights, read_config, save_folder
from vla_rl.rewards.calibration import Counts, choose_threshold
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.reward import Judgement

_PART = 512  # pictures looked at together


@dataclass(frozen=True)
class SuccessConfig:
    """Sizes of the network, and for how long a success must last to be one."""

    width: int = 32
    stem: int = 16  # channels of the first layer, which the instruction gates
    looks: int = 4  # places in a picture that the decision is made from
    hold: int = 3  # frames in a row at or above the threshold; one frame may be mistaken


class SuccessClassifier(nn.Module):
    """A small convolutional network that the instruction steers from its first layer on (a ``Reward``).

    The instruction, read word by word, scales and shifts the channels of the first layer (FiLM, Perez et al. 2017,
    arXiv 1709.07871; there all layers are modulated, here the first, where colours are still told apart).  The decision
    is made from the features at a few places that the network attends to, and where these are, in every camera.

    ``progress`` is the probability that the frame shows success, under the share of successes it was trained with;
    ``done`` needs ``config.hold`` frames in a row whose score reaches ``threshold`` (a logit, see :meth:`calibrate`).
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: SuccessConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: what instructions may consist of."""
        super().__init__()
        self.cameras, self.words, self.config = dict(sorted(cameras.items())), tuple(words), config
        self.threshold = 0.0
        width, stem = config.width, config.stem
        self._index = {word: i + 1 for i, word in enumerate(self.words)}
        self.embedding = nn.Embedding(len(self.words) + 1, width, padding_idx=0)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.gate = nn.Linear(width, 2 * stem)
        self.first = nn.Conv2d(3, stem, 5, 2, 2)
        self.second = nn.Conv2d(stem, width, 3, 2, 1)
        self.third, self.fourth = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.attention = nn.Conv2d(width, config.looks, 1)
        seen = len(self.cameras) * config.looks * (width + 2)
        self.head = nn.Sequential(nn.Linear(seen, 2 * width), nn.SiLU(), nn.Linear(2 * width, 1))

    @classmethod
    def for_frames(cls, frames: LabelledFrames, config: SuccessConfig) -> SuccessClassifier:
        """An untrained one with the cameras and words of ``frames``."""
        words = sorted({word for text in np.unique(frames.text) for word in _split(text)})
        return cls({name: image.shape[1:] for name, image in frames.images.items()}, words, config)

    # -- the network ------------------------------------------------------------------------------------------------

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Scores [B], the logit of success, of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        self._check(images, axes=1)
        scale, shift = self.gate(self.read(text))[..., None, None].chunk(2, 1)
        seen = [self._look(self._tensor(images[name]), scale, shift) for name in self.cameras]
        scores: Tensor = self.head(torch.cat(seen, -1))[:, 0]
        return scores

    def read(self, text: Sequence[str]) -> Tensor:
        """What ``text`` [B] asks for, [B,width]; each distinct one is read once.

        Raises ContractError for a word that was not in the texts it was made for.
        """
        distinct, inverse = np.unique(np.asarray(text, dtype=str), return_inverse=True)
        rows = [self._encode(str(one)) for one in distinct]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.gate.weight.device)
        states, _ = self.reader(self.embedding(tokens))
        last = (tokens > 0).sum(1) - 1
        read: Tensor = states[torch.arange(len(rows)), last][torch.as_tensor(inverse)]
        return read

    def _encode(self, text: str) -> Tensor:
        words = _split(text)
        unknown = [word for word in words if word not in self._index]
        if unknown or not words:
            reason = f"the word {unknown[0]!r} is new to it" if unknown else "it has no words"
            raise ContractError(
                f"the success classifier cannot judge {text!r} because {reason}; use the words "
                f"{', '.join(self.words)}, or train one with frames under that text."
            )
        return torch.tensor([self._index[word] for word in words])

    def _look(self, image: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Features and positions [B, looks*(width+2)] of the places looked at in ``image`` uint8 [B,h,w,3]."""
        pixels = image.permute(0, 3, 1, 2).to(scale.dtype) / 127.5 - 1.0
        cells = nn.functional.silu(self.first(pixels) * (1 + scale) + shift)
        cells = nn.functional.silu(self.second(cells))
        cells = nn.functional.silu(self.fourth(cells + nn.functional.silu(self.third(cells))))
        weight = self.attention(cells).flatten(2).softmax(-1)
        y, x = (torch.linspace(-1, 1, size, device=cells.device, dtype=cells.dtype) for size in cells.shape[2:])
        places = torch.cartesian_prod(y, x).flip(-1)
        return torch.cat([weight @ cells.flatten(2).transpose(1, 2), weight @ places], -1).flatten(1)

    # -- learning ---------------------------------------------------------------------------------------------------

    def loss(self, frames: LabelledFrames) -> tuple[Tensor, dict[str, float]]:
        """Binary cross-entropy of ``frames``, and the share that a threshold of 0 decides rightly."""
        score, label = self(frames.images, frames.text), self._tensor(frames.label)
        loss = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        return loss, {"right": float(((score.detach() > 0) == label).float().mean())}

    @torch.no_grad()
    def scores(self, frames: LabelledFrames) -> np.ndarray:
        """float32 [N], the logits of success."""
        index = np.split(np.arange(len(frames)), range(_PART, len(frames), _PART))
        parts = [frames.rows(part) for part in index]
        return np.concatenate([self(part.images, part.text).float().cpu().numpy() for part in parts])

    def calibrate(self, frames: LabelledFrames, precision: float) -> Counts:
        """Choose the lowest ``threshold`` that is right in at least ``precision`` of the ``frames`` that reach it.

        ``frames`` must not have been learnt from.  Raises UserError when there is no such threshold.
        """
        score = self.scores(frames)
        self.threshold = choose_threshold(score, frames.label, precision)
        return Counts.of_decisions(score >= self.threshold, frames.label)

    # -- judging ----------------------------------------------------------------------------------------------------

    def initial_state(self, rows: int) -> State:
        return {"streak": np.zeros(rows, np.int64)}

    def reset_state(self, state: State, rows: Array) -> State:
        streak = state["streak"].copy()
        streak[np.asarray(rows)] = 0
        return {"streak": streak}

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        self._check(frames, axes=2)
        counts = np.asarray(self._tensor(valid).cpu(), bool)
        rows, time = counts.shape
        flat = {name: self._tensor(frames[name]).flatten(0, 1) for name in self.cameras}
        words = np.repeat(np.asarray(text, dtype=str), time)
        parts = torch.arange(rows * time).split(_PART)
        score = torch.cat([self({n: i[part] for n, i in flat.items()}, words[part.numpy()]) for part in parts])
        high = (score >= self.threshold).cpu().numpy().reshape(rows, time)
        streak, done = state["streak"], np.zeros((rows, time), bool)
        for t in range(time):
            streak = np.where(counts[:, t], np.where(high[:, t], streak + 1, 0), streak)
            done[:, t] = streak >= self.config.hold
        progress = score.sigmoid().float().cpu().numpy().reshape(rows, time)
        return Judgement(progress, done), {"streak": streak}

    def _check(self, images: Mapping[str, Array], axes: int) -> None:
        """Raise ContractError unless ``images`` {camera: [...,h,w,3]} are there for all its cameras in their sizes."""
        given = {name: tuple(image.shape[axes:]) for name, image in images.items() if name in self.cameras}
        if given != self.cameras:
            raise ContractError(
                f"the success classifier was made for pictures {self.cameras} but got {given}, so it would judge what "
                "it has never seen; give it these cameras and sizes, or train one for others."
            )

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, device=self.gate.weight.device)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` (sizes, cameras, words, threshold) and ``model.safetensors``."""
        config = {
            "reward": f"{type(self).__module__}:{type(self).__qualname__}",
            "config": to_json(self.config),
            "cameras": to_json(self.cameras),
            "words": list(self.words),
            "threshold": self.threshold,
        }
        save_folder(Path(folder), config, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> SuccessClassifier:
        """Load a checkpoint, its threshold included."""
        saved = read_config(Path(folder), "reward")
        cameras = {name: tuple(shape) for name, shape in saved["cameras"].items()}
        model = cls(cameras, saved["words"], from_json(saved["config"]))
        model.threshold = float(saved["threshold"])
        load_weights(model, Path(folder))
        return model.eval()


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
