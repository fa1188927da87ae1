"""An image encoder conditioned on the instruction, shared by the learned reward models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError


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
        features: Tensor = states[torch.arange(len(tokenized)), last][torch.as_tensor(inverse)]
        return features

    def check_images(self, images: Mapping[str, Array], axes: int) -> None:
        """Raise ContractError unless ``images`` hold all cameras in their sizes, after ``axes`` leading axes."""
        given = {name: tuple(image.shape[axes:]) for name, image in images.items() if name in self.cameras}
        if given != self.cameras:
            raise ContractError(
                f"the reward model was made for images {self.cameras} but got {given}, so its output would mean "
                "nothing; give it these cameras and sizes, or train one for others."
            )

    def to_tensor(self, array: Array) -> Tensor:
        """``array`` on the device of the weights."""
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
