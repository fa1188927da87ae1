"""Instructions as tokens: of a public folder's tokenizer, of the one on the Hugging Face hub that its config names, or
words of a vocabulary that is written into the checkpoint.

``tokenizer.json`` holds data only, and the package ``tokenizers`` reads it as the libraries did that trained these
models; no class is looked up and no code of a folder runs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.hub import located, portable
from vla_rl.contract.load import installed, name_of
from vla_rl.pretrained import Saveable, read_config, save_folder

FILE = "tokenizer.json"
_CONFIG = "prompts"  # of a saved folder: its class, as vla_rl/pretrained.py reads it


@dataclass(frozen=True)
class TokenizerPrompts:
    """``Prompts`` by a tokenizer; instructions in ``known`` need none, so a saved policy acts without it.

    folder    where the tokenizer is, here or on the hub; when it is not there, that of the model ``name`` of the hub
    template  what is written around an instruction
    start     the token that every prompt starts with, "" for none
    longest   tokens that the model was trained with at most
    """

    folder: str
    name: str = ""
    template: str = "{}\n"
    start: str = ""
    longest: int = 48
    known: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def learn(self, texts: Sequence[str]) -> TokenizerPrompts:
        """The same with ``texts`` among ``known``."""
        return replace(self, known={**self.known, **{text: self._tokens(text) for text in texts}})

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [N,L], padded with 0 on the right, and their mask bool [N,L]; L is the longest of these texts.

        Raises UserError when the tokenizer is missing or damaged, and for an instruction of too many tokens.
        """
        rows = [self._tokens(text) for text in texts]
        length = max(map(len, rows), default=0)
        tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=torch.int64)
        mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
        return tokens.reshape(len(rows), length), mask.reshape(len(rows), length)

    def _tokens(self, text: str) -> Sequence[int]:
        if text in self.known:
            return self.known[text]
        tokenizer = open_tokenizer(self.folder, self.name)
        found: list[int] = tokenizer.encode(self.template.replace("{}", text.rstrip("\n"))).ids
        if self.start:
            found = _started(tokenizer, self.start, found)
        if len(found) > self.longest:
            raise UserError(
                f"the instruction {text!r} has {len(found)} tokens, but the model was trained with at most "
                f"{self.longest}, so its end would be lost; use a shorter one."
            )
        return found

    def save_pretrained(self, folder: str | Path) -> None:
        """Write where the tokenizer is and the tokens of the known instructions."""
        kind = name_of(type(self))
        options = to_json(replace(self, folder=portable(self.folder)))
        save_folder(Path(folder), {_CONFIG: kind, "options": options}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> TokenizerPrompts:
        return from_json(read_config(Path(folder), _CONFIG)["options"])


def _started(tokenizer: Any, start: str, tokens: list[int]) -> list[int]:
    """``tokens`` with exactly one ``start`` in front: files of the same tokenizer differ in whether they add it."""
    first = tokenizer.token_to_id(start)
    if first is None:
        raise UserError(
            f"the tokenizer has no token {start!r}, which every prompt of this model starts with, so it belongs to "
            f"another model; copy {FILE} of the model's own."
        )
    return tokens if tokens[:1] == [first] else [first, *tokens]


@lru_cache(maxsize=4)
def open_tokenizer(folder: str, name: str) -> Any:
    """The ``tokenizers.Tokenizer`` of ``folder``, or that of the model ``name`` of the hub.

    Raises UserError, naming the file and where to copy it from, when there is none, and when it is damaged.
    """
    kind = installed("tokenizers", "no instruction can be read", "vla").Tokenizer
    path = Path(located(folder)) / FILE
    if not path.is_file():
        path = _from_hub(folder, name)
    try:
        return kind.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower one
        raise UserError(
            f"{str(path)!r} is no tokenizer that can be read ({error}), so instructions cannot be encoded; download it "
            "again (in a git checkout: `git lfs pull`)."
        ) from error


def _from_hub(folder: str, name: str) -> Path:
    """The file of ``name`` in the hub's cache, downloaded where it is not there yet."""
    if not name:
        raise UserError(
            f"{folder!r} has no {FILE}, so instructions cannot be encoded; copy it into the folder from where the "
            "checkpoint was published."
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{folder!r} has no {FILE} and that of {name} cannot be had ({reason}), so instructions cannot be encoded; "
            f"copy {FILE} of {name} into the folder."
        ) from error


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
        return cls(from_json(read_config(Path(folder), "prompts")["vocabulary"]))


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
