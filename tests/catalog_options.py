"""What tests of the whole catalogue give to entries that are about another environment."""

from __future__ import annotations

from typing import Any

_NEEDED: dict[str, dict[str, Any]] = {"isolated": {"env": "counting", "workers": 2}}


def needed_options(name: str) -> dict[str, Any]:
    """The options without which the entry ``name`` makes nothing."""
    return _NEEDED.get(name, {})
