"""A seed means one scene, also where thousands of environments are reset by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LIMIT = 2**32  # numpy's seeds are below it


def folded(seed: int) -> int:
    """``seed`` as ManiSkill takes it."""
    return seed % _LIMIT


class SeededRows(TorchFunctionMode):
    """Inside, ``torch.rand``, ``randn`` and ``randint`` of R rows draw row k from a generator of the k-th seed.

    ManiSkill seeds one generator for all environments that it resets at once, so that a scene depends on which others
    are reset with it.  Row k draws the numbers that a reset of that environment alone on the processor draws.  Draws
    of another number of rows are left alone; and where a task repeats draws until every row fits, what a row draws
    afterwards depends on the other rows still.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(folded(seed)) for seed in seeds]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        numbers, size = _split(func, args, given)
        if size is None or not size or size[0] != len(self._generators) or given.get("generator") is not None:
            return func(*args, **(kwargs or {}))
        device = given.pop("device", None)
        rows = [func(*numbers, size[1:], generator=generator, **given) for generator in self._generators]
        return torch.stack(rows).to(device)


def _split(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """What ``func`` draws between and the size that it is asked for (None: no draw); the size leaves ``given``."""
    if func in (torch.rand, torch.randn):
        if "size" in given:
            return (), tuple(given.pop("size"))
        return (), tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
    if func is torch.randint:
        ends = tuple(given.pop(name) for name in ("low", "high") if name in given)
        count = sum(isinstance(item, int) for item in args)
        size = given.pop("size", None) if len(args) == count else args[count]
        return (*args[:count], *ends), None if size is None else tuple(size)
    return (), None
