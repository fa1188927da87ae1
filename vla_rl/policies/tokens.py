"""Instructions as word indices: a vocabulary that is written into the checkpoint."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.contract.errors import ContractError

_SHOWN = 20  # known words in an error message


@dataclass(frozen=True)
class Vocabulary:
    """Known words in order, of any script; index 0 is padding, word ``i`` has index ``i + 1``."""

    words: tuple[str, ...]
    length: int = 12  # words of the longest instruction

    @classmethod
    def from_texts(cls, texts: Iterable[str], length: int = 12) -> Vocabulary:
        """All words of ``texts``, sorted, so that the same texts give the same indices.

        The maximum ``length`` grows to that of the longest text.
        """
        split = [_split(text) for text in texts]
        return cls(tuple(sorted({word for words in split for word in words})), max([length, *map(len, split)]))

    def encode(self, texts: Iterable[str]) -> Tensor:
        """int64 [N, length], padded with 0.  Raises ContractError for an unknown word or a text that is too long."""
        index = {word: i + 1 for i, word in enumerate(self.words)}
        tokens = []
        for text in texts:
            words = _split(text)
            unknown = [word for word in words if word not in index]
            if unknown or len(words) > self.length:
                reason = f"the word {unknown[0]!r} is not in its vocabulary" if unknown else "it is too long"
                more = ", ..." if len(self.words) > _SHOWN else ""
                raise ContractError(
                    f"the policy cannot read {text!r} because {reason}; use at most {self.length} of the words "
                    f"{', '.join(self.words[:_SHOWN])}{more}, or train a policy on instructions that contain it."
                )
            tokens.append([index[word] for word in words] + [0] * (self.length - len(words)))
        return torch.tensor(tokens, dtype=torch.long).reshape(-1, self.length)


def _split(text: str) -> list[str]:
    """Words in lower case: runs of letters, marks and digits; in scripts without spaces, single characters."""
    return list(_words(unicodedata.normalize("NFKC", text).casefold()))


def _words(text: str) -> Iterator[str]:
    word = ""
    for character in text:
        alone = _has_no_spaces(character)
        if word and (alone or unicodedata.category(character)[0] not in "LMN"):
            yield word
            word = ""
        if alone:
            yield character
        elif unicodedata.category(character)[0] in "LMN":
            word += character
    if word:
        yield word


def _has_no_spaces(character: str) -> bool:
    """Whether it is an ideograph or kana, which are written without spaces between words."""
    return "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff" or character >= "\U00020000"
