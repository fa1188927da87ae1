"""Instructions as word indices: a vocabulary that is written into the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.contract.errors import ContractError


@dataclass(frozen=True)
class Vocabulary:
    """Known words in order; index 0 is padding, word ``i`` has index ``i + 1``."""

    words: tuple[str, ...]
    length: int = 12

    @classmethod
    def from_texts(cls, texts: Iterable[str], length: int = 12) -> Vocabulary:
        """All words of ``texts``, sorted, so that the same texts give the same indices."""
        return cls(tuple(sorted({word for text in texts for word in _split(text)})), length)

    def encode(self, texts: Iterable[str]) -> Tensor:
        """int64 [N, length], padded with 0.  Raises ContractError for an unknown word or a text that is too long."""
        index = {word: i + 1 for i, word in enumerate(self.words)}
        rows = []
        for text in texts:
            words = _split(text)
            unknown = [word for word in words if word not in index]
            if unknown or len(words) > self.length:
                reason = f"the word {unknown[0]!r} is not in its vocabulary" if unknown else "it is too long"
                raise ContractError(
                    f"the policy cannot read {text!r} because {reason}; use at most {self.length} of the words "
                    f"{', '.join(self.words)}, or ground a policy on captions that contain it."
                )
            rows.append([index[word] for word in words] + [0] * (self.length - len(words)))
        return torch.tensor(rows, dtype=torch.long)


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
