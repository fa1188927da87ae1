"""Frozen policies inside a trainable one: they follow its device but are not among its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class HoldsFrozen(nn.Module):
    """A module with other policies in ``_frozen``, which are not registered as submodules.

    So they are neither trained nor saved with its weights nor cast to its dtype, and they may be black boxes without
    tensors.  ``to(device)`` moves those that are modules.
    """

    action_low: Tensor
    _frozen: tuple[Any, ...]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda`` and ``cpu`` call."""
        super()._apply(fn, recurse)
        for part in self._frozen:
            if isinstance(part, nn.Module):
                part.to(self.action_low.device)
        return self
