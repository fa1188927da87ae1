"""A device that is not the host, for machines without one: its tensors are on the host but pretend not to be.

What is computed is right, and what would fail on a GPU fails here: tensors of two devices in one operation, and tensors
of the other device taken for arrays.  It calls itself "meta", the one device that every build of torch knows how to
index; nothing is lost by that, because everything is intercepted before torch would do what it does for meta tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")
_BETWEEN = ("_to_copy", "copy_")  # what takes from one device to the other
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")  # what takes indices of the host as well


class _Away(Tensor):
    """A tensor whose device is not the host; ``inner`` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Away:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: _Away = Tensor._make_wrapper_subclass(cls, inner.size(), device=ELSEWHERE, **layout)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Numbers come to the host, as from a GPU; torch does not do it for subclasses."""
        return self.inner.tolist()


class _Mode(TorchDispatchMode):
    """Handles operations that only name the device, and those that move tensors to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """There is such a device meanwhile; what is computed at half precision is so on the host."""
    with _Mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda kind, *given, **named: torch.amp.autocast("cpu", *given, **named))
        patch.setattr(torch, "tensor", _moved(torch.tensor))  # these two go to the device below any dispatch
        patch.setattr(torch, "as_tensor", _moved(torch.as_tensor))
        patch.setattr(
            sys.modules["torch.optim.optimizer"],
            "_get_fused_kernels_supported_devices",
            lambda: ["cpu", ELSEWHERE.type],
        )
        yield ELSEWHERE


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, on the host first and then moved."""

    def made(data: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        tensor = data.to(dtype=dtype) if isinstance(data, Tensor) else make(data, dtype=dtype, **options)
        return tensor if device is None else tensor.to(device)

    return made


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name, asked = func._overloadpacket.__name__, kwargs.get("device")  # type: ignore[attr-defined]
    away = isinstance(args[0], _Away) if name in _BETWEEN else _one_device(name, args, kwargs)
    if asked is not None:
        away = asked == ELSEWHERE
    inner_args, inner_kwargs = tree_map(_inner, (tuple(args), dict(kwargs)))
    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_outer, out)) if away else out


def _one_device(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether that is elsewhere; numbers are everywhere, and indices of the host where they are needed."""
    found = {isinstance(item, _Away) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor) and item.dim()}
    if name in _INDEXED and isinstance(args[0], _Away):
        found = {isinstance(item, _Away) for item in (args[0], *args[2:3]) if item.dim()}
    if len(found) > 1:
        raise RuntimeError(f"{name} got tensors of two devices")
    return found == {True} or any(isinstance(item, _Away) for item in tree_leaves((args, kwargs)))


def _inner(item: Any) -> Any:
    return item.inner if isinstance(item, _Away) else item


def _outer(item: Any) -> Any:
    return _Away(item) if isinstance(item, Tensor) and not isinstance(item, _Away) else item
