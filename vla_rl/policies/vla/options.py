"""How a vision-language-action checkpoint is opened: its cameras, what it executes, what is trained and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from vla_rl.contract.config import check_choice, check_limits
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.normalization import Relative
from vla_rl.policies.vla.inference import Eager, Inference
from vla_rl.policies.vla.network import DecoderNetwork, VisionLanguage


class Trains:
    """The frozen dataclass that chooses the trained parameters of a network."""

    @property
    def reaches_prefix(self) -> bool:
        """Whether the prefix of an observation changes while these are trained, so that none can be kept."""
        raise NotImplementedError

    def prepare(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        """Freeze ``network`` but for these parameters; returns them by name.  Adapters are added here."""
        chosen = self.chosen(network)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in chosen)
        return chosen

    def chosen(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        raise NotImplementedError


@dataclass(frozen=True)
class TrainExpert(Trains):
    """The action expert and its projections; the vision-language model is frozen (LeRobot's train_expert_only)."""

    reaches_prefix = False

    def chosen(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        return network.expert_parameters()


@dataclass(frozen=True)
class TrainAll(Trains):
    """Everything, the vision-language model included."""

    reaches_prefix = True

    def chosen(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        return dict(network.named_parameters())


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


_LAYERS, _ADAPTER = ".layers.", ".lora_"  # in names of parameters
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class TrainLoRA(Trains):
    """Adapters ``W + alpha / rank * B A`` on the linear parts of layers; B starts at 0, so at first nothing changes.

    rank, alpha  as in peft
    parts        last names of the linear parts that get one; the defaults are those of Gemma and Llama
    within       "expert", or "all": the layers of the vision-language model as well, so that no prefix can be kept

    What the expert has beside its layers (projections of state, action and time, the last norm) is small and trained as
    it is, but for a vocabulary (OpenVLA's has 260 million numbers), which stays.  There is no dropout: with it, the
    density of an action would not be the one that it was drawn from.
    Raises UserError for a number without a meaning.
    """

    rank: int = 16
    alpha: float = 16.0
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    within: str = "expert"

    def __post_init__(self) -> None:
        check_limits(self, rank=(1, math.inf), alpha=(0.0, math.inf))
        check_choice(self, "within", "expert", "all")

    @property
    def reaches_prefix(self) -> bool:
        """Whether the vision-language model gets adapters."""
        return self.within == "all"

    def chosen(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        """Add the adapters; only they and what the expert has beside its layers are trained afterwards.

        The tensor of an adapted part is called ``PART.base_layer.weight`` from then on, and the adapter's
        ``PART.lora_A.default.weight`` and ``PART.lora_B.default.weight``.  Raises UserError without peft, and when no
        part has one of the names.
        """
        package, module = installed("peft", "no adapters can be trained", "vla"), cast(nn.Module, network)
        config = package.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0, target_modules=self._targets(network, module)
        )
        package.inject_adapter_in_model(config, module)
        expert = network.expert_parameters()
        return {
            name: item
            for name, item in network.named_parameters()
            if _ADAPTER in name or (name in expert and not any(part in name for part in (_LAYERS, *_VOCABULARY)))
        }

    def _targets(self, network: VisionLanguage, module: nn.Module) -> list[str]:
        """The full names of the parts that get an adapter."""
        expert = network.expert_parameters()
        found = [
            name
            for name, item in module.named_modules()
            if isinstance(item, nn.Linear)
            and name.rpartition(".")[2] in self.parts
            and _LAYERS in name
            and (self.within == "all" or f"{name}.weight" in expert)
        ]
        if not found:
            raise UserError(
                f"no layer of {type(network).__name__} has a linear part called {', '.join(self.parts)}, so LoRA would "
                "train nothing; name parts that it has."
            )
        return found


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class VLAOptions:
    """Choices that a public checkpoint leaves to whoever opens it; a checkpoint of ours holds them.

    What is trained is stored in float32 in any case, or an optimizer's small steps would be lost.  Relative
    actions are said by LeRobot's processors; folders of others cannot say them, and have absolute ones unless told.

    Raises UserError for a choice that does not exist.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)  # checkpoint's camera: environment's; {}: equal names
    horizon: int = 0  # H, actions executed of a chunk; 0: the checkpoint's, at most the environment's longest chunk
    statistics: str = ""  # a folder or file with the statistics of state and action; "": the checkpoint's own
    statistics_key: str = ""  # the dataset or robot among several in there
    relative: Relative = ()  # which entries of an action are relative to the state; (): those that the folder says
    sampler: FlowSampler = FlowSampler(Ode(), AllSteps(), steps=10)  # this one: as many steps as the folder says
    trains: Trains = TrainExpert()
    kept: str = "auto"  # of an observation, for learning: "prefix", "pictures", or the one that features.py says
    inference: Inference = Eager()  # how the network runs when it acts: or Compiled(), CudaGraph()
    dtype: str = "float32"  # that layers compute in, and what is frozen is stored in: or "bfloat16"; see below
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        check_limits(self, horizon=(0, math.inf))
        check_choice(self, "kept", "auto", "prefix", "pictures")
        check_choice(self, "dtype", *_DTYPES)

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]
