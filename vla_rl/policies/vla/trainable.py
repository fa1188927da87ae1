"""Which tensors of a vision-language-action model are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.network import DecoderNetwork, VisionLanguage


class Trains(Protocol):
    """The frozen dataclass that chooses the trained parameters of a network."""

    @property
    def reaches_prefix(self) -> bool:
        """Whether the prefix of an observation changes while these are trained, so that none can be kept."""

    def prepare(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        """Freeze ``network`` but for these parameters; returns them by name.  Adapters are added here."""


@dataclass(frozen=True)
class TrainExpert:
    """The action expert and its projections; the vision-language model is frozen (LeRobot's train_expert_only)."""

    reaches_prefix = False

    def prepare(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        chosen = network.expert_parameters()
        freeze_others(network, chosen)
        return chosen


@dataclass(frozen=True)
class TrainAll:
    """Everything, the vision-language model included."""

    reaches_prefix = True

    def prepare(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        chosen = dict(network.named_parameters())
        freeze_others(network, chosen)
        return chosen


def freeze_others(network: VisionLanguage, chosen: dict[str, nn.Parameter]) -> None:
    """Let only ``chosen`` require gradients."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in chosen)


def cast_frozen(network: VisionLanguage, trained: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Store what is not trained in ``dtype``: half of its memory in bfloat16, where a step of an optimizer is lost.

    All of a ``DecoderNetwork`` computes in bfloat16 then, the trained part too, by copies of its float32 weights.
    """
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in trained else dtype)
    if isinstance(network, DecoderNetwork):
        network.compute_dtype = None if dtype == torch.float32 else dtype


def checkpoint_gradients(network: VisionLanguage, wanted: bool) -> None:
    """Let ``network`` compute activations again in the backward pass; raises UserError for one that does not know how.

    Networks that do have the attribute ``gradient_checkpointing``.
    """
    if hasattr(network, "gradient_checkpointing"):
        network.gradient_checkpointing = wanted
    elif wanted:
        raise UserError(
            f"{type(network).__name__} cannot compute activations again in the backward pass, so gradient "
            "checkpointing would save nothing; set gradient_checkpointing to False and lower micro_batch instead."
        )
