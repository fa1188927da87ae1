"""Low-rank adapters (LoRA, arXiv 2106.09685) by Hugging Face's ``peft``, for any vision-language-action model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_choice, check_limits
from vla_rl.policies.vla.network import VisionLanguage
from vla_rl.policies.vla.trainable import freeze_others

_LAYERS, _ADAPTER = ".layers.", ".lora_"  # in names of parameters
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class TrainLoRA:
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

    def prepare(self, network: VisionLanguage) -> dict[str, nn.Parameter]:
        """Add the adapters; only they and what the expert has beside its layers are trained afterwards.

        The tensor of an adapted part is called ``PART.base_layer.weight`` from then on, and the adapter's
        ``PART.lora_A.default.weight`` and ``PART.lora_B.default.weight``.  Raises UserError without peft, and when no
        part has one of the names.
        """
        package, module = _peft(), cast(nn.Module, network)
        config = package.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0, target_modules=self._targets(network, module)
        )
        package.inject_adapter_in_model(config, module)
        expert = network.expert_parameters()
        chosen = {
            name: item
            for name, item in network.named_parameters()
            if _ADAPTER in name or (name in expert and not any(part in name for part in (_LAYERS, *_VOCABULARY)))
        }
        freeze_others(network, chosen)
        return chosen

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


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, so no adapters can be trained; pip install 'vla-rl[vla]'."
        ) from error
    return peft
