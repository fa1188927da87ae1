"""Instructions as tokens, with a mask of the padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.load import name_of
from vla_rl.policies.tokens import Vocabulary
from vla_rl.pretrained import Saveable, read_config, save_folder


class Prompts(Saveable, Protocol):
    """A tokenizer with what a model family writes around an instruction."""

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [N,L] of instructions, padded on the right, and which of them count, bool [N,L]."""


@dataclass(frozen=True)
class WordPrompts:
    """Every word is a token: for a model that is trained from nothing."""

    vocabulary: Vocabulary

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Raises ContractError for a word that is not in the vocabulary."""
        tokens = self.vocabulary.encode(texts)
        counts = tokens != 0
        longest = int(counts.sum(1).max())
        return tokens[:, :longest], counts[:, :longest]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the words into ``config.json``."""
        kind = name_of(type(self))
        save_folder(Path(folder), {"prompts": kind, "vocabulary": to_json(self.vocabulary)}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> WordPrompts:
        """Load what :meth:`save_pretrained` wrote."""
        return cls(from_json(read_config(Path(folder), "prompts")["vocabulary"]))
