"""How many bytes of tensors are alive: now, and at most so far."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        for tensor in tensors:
            storage = tensor.untyped_storage()
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
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
