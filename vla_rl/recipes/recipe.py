"""What a config function returns: a frozen dataclass that says everything about a run and can run itself."""

from __future__ import annotations

from typing import Any, Protocol

from vla_rl.training.tracking import RunFolder


class Recipe(Protocol):
    """Anything that ``vla-rl train`` can run."""

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Do it, leaving everything in ``folder``; returns what belongs into ``summary.json``."""
