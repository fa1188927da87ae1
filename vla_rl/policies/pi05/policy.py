"""pi0.5 (arXiv 2504.16054) as a policy: a folder of LeRobot as it was downloaded, or random weights.

Its prompt holds the robot's state: ``Task: TEXT, State: 12 255 0;`` and ``Action: `` below.  Every entry, normalised,
is the number of its bin among 256 from -1 to 1 (openpi's PaligemmaTokenizer, LeRobot's processor of "pi05"); what lies
below -1 is -1.  The prompt is put together from the tokens of its parts, so that no tokenizer runs while a robot acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import name_of
from vla_rl.policies.pi0.policy import shape_of as pi0_shape
from vla_rl.policies.pi05.network import Pi05Shape
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.features import Views
from vla_rl.policies.vla.flow_vla import FlowVLA, flow_from_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Prompts, TokenizerPrompts, Vocabulary, WordPrompts, open_tokenizer
from vla_rl.pretrained import load_module, read_config, save_folder

BINS = 256
NUMBERS = BINS + 1  # from -1 to 255
_START = "<bos>"
_FASTEST = 16.0  # half turns of a wave from 0 to the largest number; the slowest makes a sixteenth of one
_HEAD, _TAIL = "Task: {}, State:", ";\nAction: "
_NAME = "prompts"  # of a saved folder, as vla/tokenizer.py names it


@dataclass(frozen=True)
class StatePrompts:
    """``Prompts`` of the part in front of the state.

    texts    what writes the instruction
    numbers  the tokens of " -1", " 0" and so on to " 255"
    tail     those behind the state
    """

    texts: Prompts
    numbers: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    @classmethod
    def of_tokenizer(cls, folder: str, name: str, longest: int) -> StatePrompts:
        """By the tokenizer in ``folder``, or ``name`` on the hub.

        Raises UserError where a prompt is not the tokens of its parts in a row: there, the state would be misread.
        """
        tokenizer = open_tokenizer(folder, name)

        def tokens(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        head = tokens(_HEAD.replace("{}", "x"))
        numbers = [tuple(tokens(f"{_HEAD.replace('{}', 'x')} {number}")[len(head) :]) for number in range(-1, BINS)]
        tail = tuple(tokens(f"{_HEAD.replace('{}', 'x')} 0{_TAIL}")[len(head) + len(numbers[1]) :])
        drawn = np.random.default_rng(0).integers(-1, BINS, (64, 9))
        for row in drawn.tolist():
            whole = tokens(f"{_HEAD.replace('{}', 'x')} {' '.join(map(str, row))}{_TAIL}")
            if whole != [*head, *(token for number in row for token in numbers[number + 1]), *tail]:
                raise UserError(
                    f"the tokenizer of {folder!r} joins numbers of a state with what stands beside them, so vla-rl "
                    "would write another prompt than pi0.5 was trained on; use PaliGemma's, whose digits are tokens."
                )
        texts = TokenizerPrompts(folder, name, template=_HEAD, start=_START, longest=longest)
        return cls(texts, tuple(numbers), tail)

    @classmethod
    def of_words(cls, vocabulary: Vocabulary) -> StatePrompts:
        """Every word, every number and the tail is a token, for a model that is trained from nothing."""
        first = len(vocabulary.words) + 1
        return cls(WordPrompts(vocabulary), tuple((first + i,) for i in range(NUMBERS)), (first + NUMBERS,))

    def learn(self, texts: Sequence[str]) -> StatePrompts:
        """The same, acting on ``texts`` without a tokenizer."""
        if not isinstance(self.texts, TokenizerPrompts):
            return self
        return replace(self, texts=self.texts.learn([_clean(text) for text in texts]))

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See ``Prompts``; a state comes behind it."""
        return self.texts.encode([_clean(text) for text in texts])

    def longest(self, state: int) -> int:
        """The most tokens that a state of so many numbers and the tail take."""
        return state * max(map(len, self.numbers)) + len(self.tail)

    def save_pretrained(self, folder: str | Path) -> None:
        config = {_NAME: name_of(type(self)), "numbers": self.numbers, "tail": self.tail}
        save_folder(Path(folder), config, {}, {"texts": self.texts})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> StatePrompts:
        saved = read_config(Path(folder), _NAME)
        texts = load_module(Path(folder) / "texts", _NAME)
        return cls(texts, tuple(map(tuple, saved["numbers"])), tuple(saved["tail"]))


def _clean(text: str) -> str:
    """``text`` as openpi writes it."""
    return text.strip().replace("_", " ").replace("\n", " ")


class StateViews(Views):
    """``Views`` whose prompts go on with the state of the features, normalised.

    Numbers of fewer tokens than others leave gaps, which are masked: positions count what is not.
    """

    def __init__(self, views: Views, prompts: StatePrompts) -> None:
        super().__init__(views.cameras, views.tokens, views.mask, views.learnt)
        width, device = max(map(len, prompts.numbers)), views.tokens.device
        rows = [[*number, *[-1] * (width - len(number))] for number in prompts.numbers]
        self._numbers = torch.tensor(rows, device=device)  # -1: none
        self._tail = torch.tensor([prompts.tail], device=device)
        self._edges = torch.from_numpy(np.linspace(-1.0, 1.0, NUMBERS)[:-1]).to(device)
        self._whole = width == min(map(len, prompts.numbers))

    def prompt(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        head, mask = super().prompt(features)
        found = torch.bucketize(features["state"].double(), self._edges, right=True)
        numbers = self._numbers[found].flatten(1)
        tokens = torch.cat((head, numbers.clamp_min(0), self._tail.expand(len(head), -1)), 1)
        if mask is None and self._whole:
            return tokens, None
        shown = torch.ones_like(head, dtype=torch.bool) if mask is None else mask
        return tokens, torch.cat((shown, numbers >= 0, shown.new_ones(len(head), self._tail.shape[1])), 1)


class Pi05(FlowVLA):
    """pi0.5: PaliGemma and a flow expert whose norms follow the time; chunks of 50 x 32 numbers, padding included.

    The robot's state is written into the prompt in 256 steps from -1 to 1, so the prefix depends on it, and what lies
    beyond is not told apart: ``state_scale`` maps its range, such as quantiles, to those.
    """

    shape_class = Pi05Shape
    prompts: StatePrompts

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """A checkpoint of LeRobot (type "pi05") for an environment.

        A missing camera has no tokens.  Raises UserError, naming the key and the cure, when files or tensors are
        missing, when cameras, state or action are not the environment's, and where a prompt may be too long.
        """

        def prompts(public: PublicCheckpoint) -> StatePrompts:
            made = StatePrompts.of_tokenizer(str(public.folder), public.tokenizer, public.longest)
            tokens, _ = made.encode(spec.tasks)
            if (most := tokens.shape[1] + made.longest(spec.state.shape[0])) > public.longest:
                raise UserError(
                    f"an instruction of {spec.name!r} and a state of {spec.state.shape[0]} numbers may take {most} "
                    f"tokens, but {str(folder)!r} was trained with at most {public.longest}, so the end would be lost; "
                    "use shorter instructions."
                )
            return made

        return flow_from_public(cls, folder, spec, options or VLAOptions(), shape_of, prompts)

    @classmethod
    def word_prompts(cls, vocabulary: Vocabulary) -> tuple[StatePrompts, int]:
        prompts = StatePrompts.of_words(vocabulary)
        return prompts, prompts.tail[-1] + 1

    @torch.no_grad()
    def order_numbers(self) -> None:
        """Let the tokens of numbers begin as waves of their value, so that those of near ones are alike.

        For a model from nothing, whose action expert alone learns from robots: it would have to see every number.
        """
        words: Tensor = self.network.model.vlm.language_model.embed_tokens.weight  # type: ignore[attr-defined]
        first, width = self.prompts.numbers[0][0], words.shape[1] // 2
        value = torch.linspace(-1.0, 1.0, NUMBERS)[:, None]
        angle = value * torch.pi * _FASTEST ** torch.linspace(-1.0, 1.0, width)
        words[first : first + NUMBERS] = torch.cat([angle.sin(), angle.cos()], 1) * width**-0.5

    def prompt_of(self, task: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their mask [B,L] of ``task`` [B] and the normalised ``state`` [B,S]."""
        tokens, mask = self._views().prompt({"task": task, "state": state})
        return tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask

    @property
    def prompt_length(self) -> int:
        return super().prompt_length + self.prompts.longest(self.spec.state.shape[0])

    def _views(self) -> Views:
        views = super()._views()
        if self._known is None or self._known.tokens is not views.tokens:
            self._known = StateViews(views, self.prompts)
        self._known.mask, self._known.learnt = views.mask, views.learnt
        return self._known

    _known: StateViews | None = None


def shape_of(public: PublicCheckpoint) -> Pi05Shape:
    """The sizes of the network in a public folder."""
    found: Any = pi0_shape(public.folder, public.config)
    return Pi05Shape(**{item.name: getattr(found, item.name) for item in fields(found)})
