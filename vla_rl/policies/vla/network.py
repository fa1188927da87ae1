"""What a flow-matching vision-language-action model is to a policy: a prefix, a condition, a velocity.

Shape letters: ``B`` batch, ``C`` actions in the model's chunk (50), ``A`` the padded size of an action (32), ``L``
tokens of the prompt, ``W`` numbers that sum the prefix up for critics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.layers import Layer, ModuleLayer, Run, plainly


class Encoder(Protocol):
    """What reads pictures and a prompt."""

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        """The prefix {name: [B,...]}, computed once per observation: in a flow network ``keys`` and ``values`` of every
        layer, their ``mask``, if any, and ``pooled`` float32 [B,W], the mean of the last hidden states of valid tokens.

        ``pictures`` uint8 [B,h,w,3] of every camera, None where it is missing; ``tokens`` int64 and ``token_mask``
        bool, both [B,L], None where all tokens count: faster kernels can then be used.  The prefix does not depend on
        the robot's state.
        """


class VisionLanguage(Encoder, Protocol):
    """A model that reads pictures and a prompt once per observation; an ``nn.Module`` with public tensor names."""

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained when the vision-language model is not, by public name."""

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Bytes per observation of what :meth:`encode` returns for these cameras, None where one is missing, and so
        many tokens of the prompt.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Acting(Encoder, Protocol):
    """What a decision runs; see ``inference.py``."""

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """All that a denoising step needs of the observation, {name: [B,...]}; ``state`` is padded, normalised."""

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity [Bk,R,A] at ``x`` [Bk,R,A] and ``t`` [Bk] (1: noise, 0: action) and the expert's last hidden
        states [Bk,R,hidden_size], both float32; ``R`` is :meth:`denoised` or ``C``.

        ``k`` is 1 or more points for each of the ``B`` samples of ``condition``, those of a sample in a row.
        """


class Deciding(Acting, Protocol):
    """The same with whole decisions, which may be recorded."""

    def decide(
        self, key: Hashable, call: Callable[[Acting, dict[str, Tensor]], dict[str, Tensor]], given: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """``call(network, given)``, which at the same ``key`` does the same with other ``given`` {name: [...]}."""


class DecoderNetwork(nn.Module):
    """A flow network whose expert is a decoder (``layers.py``), so that its layers can be fused, compiled and recorded.

    compute_dtype  what layers compute in, whatever their weights are stored in; None: the dtype of the weights.  What
                   goes in and comes out (states, actions, velocities, ``pooled``) is float32
    moves          how often weights may have begun to lie elsewhere, by .to(), .cuda() and their like of this module or
                   of one around it; a step of an optimizer moves none
    """

    compute_dtype: torch.dtype | None = None
    moves = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.moves += 1
        return super()._apply(fn, recurse)

    def expert_layers(self) -> Sequence[ModuleLayer]:
        """The layers of the expert, with the weights that learn."""
        raise NotImplementedError

    def encode(
        self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None, run: Run = plainly
    ) -> dict[str, Tensor]:
        """See ``Encoder``; layers run by ``run``."""
        raise NotImplementedError

    def condition(
        self, prefix: Mapping[str, Tensor], state: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> dict[str, Tensor]:
        """See ``Acting``; ``layers`` of the expert, () for those that learn."""
        raise NotImplementedError

    def velocity(
        self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> tuple[Tensor, Tensor]:
        """See ``Acting``; ``layers`` as for :meth:`condition`."""
        raise NotImplementedError

    def computes_in(self, module: nn.Module) -> torch.dtype:
        """What a part of it computes in."""
        return self.compute_dtype or next(module.parameters()).dtype


class FlowNetwork(VisionLanguage, Acting, Protocol):
    """A vision-language model and its action expert; an ``nn.Module`` whose tensors have their public names.

    chunk, action_size, state_size   C, A, and the padded size of a state
    pooled_size                      W
    hidden_size                      of the expert's last hidden states
    """

    chunk: int
    action_size: int
    state_size: int
    pooled_size: int
    hidden_size: int

    def denoised(self, horizon: int) -> int:
        """How many actions of the chunk a chain has to hold so that its first ``horizon`` are the whole chunk's.

        All ``C`` where actions see each other; ``horizon`` where each sees only those before it.
        """

    @property
    def shape(self) -> NetworkShape:
        """The sizes from which an untrained one is built again."""

    def load_public(self, folder: Path) -> None:
        """Fill the weights from a public folder; raises UserError that lists what is missing or does not fit."""


class NetworkShape(Protocol):
    """The frozen dataclass with the sizes of a network."""

    def build(self) -> FlowNetwork:
        """The untrained network."""


class NewShape(NetworkShape, Protocol):
    """The same of a family of which there are small ones, to be trained from nothing."""

    @classmethod
    def small(cls, state: int, action: int, chunk: int = 10) -> Self:
        """For states and actions of these sizes, and chunks of so many actions."""

    def with_words(self, count: int) -> Self:
        """The same with ``count`` tokens in the vocabulary."""


def transformers() -> Any:
    """The package; raises UserError, naming the extra, when it is not installed."""
    try:
        import transformers as package
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, so no vision-language-action model can be used; pip install 'vla-rl[vla]'."
        ) from error
    return package
