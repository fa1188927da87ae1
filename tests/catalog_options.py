"""What tests of the whole catalogue give to entries that are about another environment."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from sims.catalog import CATALOG
from sims.isolation.remote import Server

IN_AN_INSTALLATION = ("genesis", "libero", "maniskill", "metaworld", "robosuite")
"""Entries that run in an installation of their own: ``make test-sims`` installs and tests them."""


WITH_TESTS_OF_THEIR_OWN = {"maniskill_lift": "tests/sims/test_maniskill_lift.py", "warp": "tests/sims/test_warp.py"}
"""Entries that keep the contract by one file: they have to compile what they run, or need another's installation."""


def entries_that_run_here() -> list[str]:
    """The names of the catalogue that need no installation and no tests of their own."""
    return sorted(set(CATALOG) - set(IN_AN_INSTALLATION) - set(WITH_TESTS_OF_THEIR_OWN))


def needed_options(name: str) -> dict[str, Any]:
    """The options without which the entry ``name`` makes nothing."""
    if name == "isolated":
        return {"env": "counting", "workers": 2}
    return {"address": _address(), "workers": 2} if name == "remote" else {}


@cache
def _address() -> str:
    """Where the counting environment is served, as long as this process lives."""
    server = Server("counting", 0)
    threading.Thread(target=server.run, daemon=True).start()
    return f"127.0.0.1:{server.port}"
