"""What tests of the whole catalogue give to entries that are about another environment."""

from __future__ import annotations

from typing import Any

from sims.catalog import CATALOG

_NEEDED: dict[str, dict[str, Any]] = {"isolated": {"env": "counting", "workers": 2}}


IN_AN_INSTALLATION = ("libero", "metaworld", "robosuite")
"""Entries that run in an installation of their own: ``make test-sims`` installs and tests them."""


def entries_that_run_here() -> list[str]:
    """The names of the catalogue that need no installation of their own."""
    return sorted(set(CATALOG) - set(IN_AN_INSTALLATION))


def needed_options(name: str) -> dict[str, Any]:
    """The options without which the entry ``name`` makes nothing."""
    return _NEEDED.get(name, {})
