"""How often the host waits for a device, counted on one that is not the host (``tests.elsewhere``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import elsewhere as another
from tests.elsewhere import ELSEWHERE

_ASKING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select")  # the host needs their result to go on


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """What the host waits for meanwhile: "read" of the device, and "write" to it that is not left to go on alone."""
    found: Counter[str] = Counter()
    real = another._run

    def counted(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if kind := _wait(func._overloadpacket.__name__, args, kwargs):
            found[kind] += 1
        return real(func, args, kwargs)

    def tolist(tensor: Any) -> Any:
        found["read"] += 1
        return tensor.inner.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(another, "_run", counted)
        patch.setattr(another._Away, "tolist", tolist)
        yield found


def _wait(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    away = [isinstance(item, another._Away) for item in args if isinstance(item, Tensor)]
    if name in _ASKING and any(away):
        return "read"
    if name == "_to_copy" and kwargs.get("device") is not None:
        to = kwargs["device"] == ELSEWHERE
        if to and not away[0]:
            return None if kwargs.get("non_blocking") else "write"
        return "read" if away[0] and not to else None
    if name == "copy_" and away[0] != away[1]:
        return "read" if away[1] else "write"
    if name in another._INDEXED and away[0]:
        index = [item for item in args[1] if item is not None]
        if any(item.dtype in (torch.bool, torch.uint8) for item in index):
            return "read"  # how many are chosen
        return None if all(isinstance(item, another._Away) for item in index) else "write"
    return None
