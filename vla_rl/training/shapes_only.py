"""Running code for its shapes alone, on torch's device "meta": nothing large takes memory or is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
_KNOWN = (torch.bool, torch.int32, torch.int64)  # dtypes of masks, indices and counters; uint8 is pixels
_FEW = 65536  # floats in a tensor whose values are kept
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


@contextmanager
def shapes_only() -> Iterator[None]:
    """Code whose tensors are on "meta" runs to its end within the block, and nothing large is computed.

    Booleans and integers keep their values, so that masks select, episodes end and counters count as they would; so do
    the few floats that follow from known ones, such as rewards.  All others are taken for 0, and so are pixels.
    """
    with _Shapes(), _HostFirst():
        yield


class _HostFirst(TorchFunctionMode):
    """Makes tensors of Python's numbers on the host and moves them, so that their values are seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in (torch.tensor, torch.as_tensor) or isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        device = kwargs.pop("device", None) or torch.get_default_device()
        return func(*args, **kwargs, device="cpu").to(device)


class _Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Tensor] = {}  # of the storages on "meta", flat, on the host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal"):
            return func(*map(self._value, args))
        if name == "_to_copy" and args[0].is_meta and kwargs.get("device", META) != META:
            return func(self._value(args[0]), **kwargs)
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return func(args[0], self._value(args[1]))
        if name in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        elif torch.Tag.dynamic_output_shape in func.tags and any(_is_meta(item) for item in args):
            return tree_map(self._moved, func(*tree_map(self._value, args), **kwargs))
        out = func(*args, **kwargs)
        outs = tree_leaves(out)
        if any(_is_meta(item) and self._keeps(item, args, name) for item in outs):
            given, named = tree_map(self._value, (args, kwargs))
            for item, value in zip(outs, tree_leaves(func(*given, **named)), strict=True):  # in place where func is
                if _is_meta(item):
                    self._remember(item, value)
        return out

    def _keeps(self, out: Tensor, args: Sequence[Any], name: str) -> bool:
        """Whether the value of ``out``, computed from ``args`` by the operation ``name``, is kept."""
        given = [item for item in tree_leaves(args) if isinstance(item, Tensor)]
        few = out.is_floating_point() and out.numel() <= _FEW and "empty" not in name  # which has no values yet
        return out.dtype in _KNOWN or (few and all(map(self._is_known, given)))

    def _is_known(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor.untyped_storage()._cdata in self._values

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``indices`` with positions instead of masks on "meta"."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.is_meta and index.dtype == torch.bool:
                found += [self._moved(item) for item in self._value(index).nonzero(as_tuple=True)]
            else:
                found.append(index)
        return found

    def _value(self, item: Any) -> Any:
        """What a tensor on "meta" holds, in the memory that all its views share, or zeros; anything else as it is."""
        if not _is_meta(item):
            return torch.device("cpu") if item == META else item
        flat = self._values.get(item.untyped_storage()._cdata)
        if flat is None or flat.dtype != item.dtype:
            return torch.zeros((), dtype=item.dtype).expand(item.shape)
        return flat.as_strided(item.size(), item.stride(), item.storage_offset())

    def _moved(self, value: Any) -> Any:
        """``value`` on "meta", if it is a tensor."""
        if not isinstance(value, Tensor):
            return value
        tensor = torch.empty_like(value, device=META)
        self._remember(tensor, value)
        return tensor

    def _remember(self, tensor: Tensor, value: Tensor) -> None:
        """Note that ``tensor`` holds ``value``, unless it is a view of what is noted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._values:
            self._values[key] = torch.zeros(storage.nbytes() // tensor.dtype.itemsize, dtype=tensor.dtype)
            if value.any():  # untouched zeros take no memory
                self._value(tensor).copy_(value)
            weakref.finalize(storage, self._values.pop, key)


def _is_meta(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_meta


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations read or return within the ``with`` block, views once.

    Nothing else is memory to it: neither what an operation takes while it computes, nor the allocator's rounding and
    gaps, nor Python objects and arrays that never become tensors.  Tensors from before the block count from the first
    operation on them, or from :meth:`add`.

    now   bytes that are alive
    peak  the most that were since :meth:`watch` or the beginning
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # of the live storages

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` from now on, until they are freed."""
        for storage in (part.untyped_storage() for tensor in tensors for part in _plain(tensor)):
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.now)

    @contextmanager
    def watch(self, note: Callable[[int, int], None]) -> Iterator[None]:
        """Call ``note(before, peak)`` after the block: the bytes at its beginning, and the most within it."""
        outer, before, self.peak = self.peak, self.now, self.now
        try:
            yield
        finally:
            note(before, self.peak)
            self.peak = max(outer, self.peak)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(item for item in tree_leaves((args, kwargs, out)) if isinstance(item, Tensor))
        return out


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of ``tensors``, those that share one counted once."""
    storages = [part.untyped_storage() for tensor in tensors for part in _plain(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the memory of ``tensor``: itself, or its parts where torch computes through a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))
