"""Eyes that an instruction steers: the part that the learned reward models have in common."""

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
    stem: int = 16  # channels of the first layer, which the instruction gates
    looks: int = 4  # places in a picture that the decision is made from


class InstructedEncoder(nn.Module):
    """A small convolutional network that the instruction steers from its first layer on.

    The instruction, read word by word, scales and shifts the channels of the first layer (FiLM, Perez et al. 2017,
    arXiv 1709.07871; there all layers are modulated, here the first, where colours are still told apart).  What comes
    out are the features at a few places that the network attends to, and where these are, in every camera.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: EncoderConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: what instructions may consist of."""
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
        self.attention = nn.Conv2d(width, config.looks, 1)
        self.size = len(self.cameras) * config.looks * (width + 2)

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Features [B,size] of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        self.check(images, axes=1)
        scale, shift = self.gate(self.read(text))[..., None, None].chunk(2, 1)
        return torch.cat([self._look(self.tensor(images[name]), scale, shift) for name in self.cameras], -1)

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

    def check(self, images: Mapping[str, Array], axes: int) -> None:
        """Raise ContractError unless ``images`` hold all its cameras in their sizes, after ``axes`` leading axes."""
        given = {name: tuple(image.shape[axes:]) for name, image in images.items() if name in self.cameras}
        if given != self.cameras:
            raise ContractError(
                f"the reward model was made for pictures {self.cameras} but got {given}, so it would judge what "
                "it has never seen; give it these cameras and sizes, or train one for others."
            )

    def tensor(self, array: Array) -> Tensor:
        """``array`` where the weights are."""
        return torch.as_tensor(array, device=self.gate.weight.device)

    def _encode(self, text: str) -> Tensor:
        words = _split(text)
        unknown = [word for word in words if word not in self._index]
        if unknown or not words:
            reason = f"the word {unknown[0]!r} is new to it" if unknown else "it has no words"
            raise ContractError(
                f"the reward model cannot judge {text!r} because {reason}; use the words "
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


def words_of(texts: Iterable[str]) -> list[str]:
    """All words of ``texts``, each once, sorted."""
    return sorted({word for text in texts for word in _split(text)})


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
