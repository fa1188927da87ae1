"""What a check of a robot finds: one line each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it: ``cure`` is "" where it will do."""

    name: str
    result: str
    cure: str = ""

    @property
    def good(self) -> bool:
        return not self.cure

    @classmethod
    def of(cls, name: str, error: Exception) -> Finding:
        """Something that cannot be found out, by an error whose text ends with the cure."""
        what, _, cure = str(error).rpartition("; ")
        return cls(name, what, cure) if what else cls(name, str(error), "look at it, and check again.")

    def __str__(self) -> str:
        return f"{self.name}: {self.result}{f'; {self.cure}' if self.cure else ''}"


@dataclass(frozen=True)
class Clock:
    """Where time comes from; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
