"""Adam whose moments take a byte for each number instead of four, by torchao (Dettmers et al. 2022, arXiv 2110.02861).

Blocks of 256 numbers share a scale; a parameter of fewer than 4,096, or of no whole number of blocks, keeps float32
moments.  torch compiles the step once for every shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchao.optim import Adam8bit as TorchaoAdam8bit
from torchao.optim.subclass_8bit import OptimState8bit


class Adam8bit(TorchaoAdam8bit):
    """torchao's, with a ``state_dict`` that can be written: its moments as plain tensors, bit for bit."""

    def state_dict(self) -> dict[str, Any]:
        return _mapped(super().state_dict(), _parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(_mapped(state_dict, _whole))


def _mapped(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """``state`` of an optimizer with every entry of every parameter changed."""
    moments = {index: {key: change(item) for key, item in own.items()} for index, own in state["state"].items()}
    return {**state, "state": moments}


def _parts(item: Tensor) -> Tensor | dict[str, Any]:
    if not isinstance(item, OptimState8bit):
        return item
    return {"codes": item.codes, "scale": item.scale, "qmap": item.qmap, "signed": item.signed}


def _whole(item: Tensor | Mapping[str, Any]) -> Tensor:
    return item if isinstance(item, Tensor) else OptimState8bit(**item)
