"""Acting with shared weights: a process that has nothing to compute gathers for those who have.

Gathering a layer takes all processes, but they do not act equally often: where an episode is truncated, its last
observation is encoded as well.  So they agree before every call of the network which one comes next.  Who wants another
one, or none, only gathers what the call needs, which is the same for all calls of a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
CALLS = ("encode", "condition", "velocity")


class Lockstep:
    """Calls of one network, whose ``units`` FSDP gathers one by one; ``total`` sums float64 over all processes.

    ``root`` is the module around the network through which FSDP begins a pass.
    """

    def __init__(self, root: nn.Module, units: Sequence[Any], total: Callable[[Tensor], Tensor]) -> None:
        self._root, self._total = root, total
        self._gathered: dict[str, list[Any]] = {}  # what a call needs, in order
        self._recording: list[Any] | None = None
        for unit in units:
            unit.register_forward_pre_hook(self._note)

    def call(self, name: str, compute: Callable[[], T]) -> T:
        """``compute()``, which is the call ``name``, when all processes make or join it."""
        while (agreed := self._agree(name)) != name:
            self._join(agreed)
        self._recording = self._gathered[name] = []
        try:
            return compute()
        finally:
            self._recording = None

    def meet(self) -> None:
        """Return when all processes have come here; until then join the calls of the others."""
        while agreed := self._agree(""):
            self._join(agreed)

    def _agree(self, wanted: str) -> str:
        """The first of all calls that a process wants, "" when none wants any."""
        wants = self._total(torch.tensor([float(name == wanted) for name in CALLS], dtype=torch.float64))
        return next((name for name, count in zip(CALLS, wants.tolist(), strict=True) if count), "")

    def _join(self, name: str) -> None:
        self._root(self._gather, self._gathered[name])

    def _gather(self, units: Sequence[Any]) -> None:
        for unit in units:
            unit.unshard()
            unit.reshard()

    def _note(self, unit: nn.Module, given: Any) -> None:
        if self._recording is not None:
            self._recording.append(unit)


class LockstepActing:
    """A network as it acts (``Acting``), in step with the other processes."""

    def __init__(self, acting: Any, lockstep: Lockstep) -> None:
        self._acting, self._lockstep = acting, lockstep

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        return self._lockstep.call("encode", lambda: self._acting.encode(pictures, tokens, token_mask))

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        return self._lockstep.call("condition", lambda: self._acting.condition(prefix, state))

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._lockstep.call("velocity", lambda: self._acting.velocity(condition, x, t))

    def decide(self, key: Any, call: Callable[[Any, Any], T], given: Any) -> T:
        return call(self, given)
